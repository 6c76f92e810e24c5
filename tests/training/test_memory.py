"""The largest budget under a limit: the search on curves that are known, and real trial steps in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrag.config import RunConfig, read_config
from distrag.training import weigh as room
from distrag.training.memory import CLOSE, describe_memory, find_budget, parse_limit, plan_memory
from distrag.training.weigh import COMPOSITIONS, choose_samples
from tests.batching.stores import lengths_store

MIB = 2**20


def config(store: Path, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"path": str(store), "max_len": 100},
        "batching": {"max_tokens": 256, "prefetch": 1},
        "model": {"dim": 256},
        "encoder": {"name": "gru"},
        "loss": {"name": "bce"},
        "train": {"num_epochs": 1, "device": "cpu", "run_dir": str(store.parent / "run")},
    }
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return read_config({**base, **merged})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).lognormal(3.0, 0.8, 4000).astype(int).clip(4, 100)
    return lengths_store(tmp_path_factory.mktemp("memory"), [int(n) for n in lengths]).path


@pytest.mark.parametrize(
    ("text", "share", "size"),
    [
        ("0.8", 0.8, 0),
        (".5", 0.5, 0),
        ("1", 1.0, 0),
        ("1.", 1.0, 0),
        ("2GiB", 0.0, 2 * 2**30),
        ("2gb", 0.0, 2_000_000_000),
        ("500 MB", 0.0, 500_000_000),
        ("1.5GiB", 0.0, 3 * 2**29),
        ("4096B", 0.0, 4096),
    ],
)
def test_shares_and_sizes_are_understood(text: str, share: float, size: int) -> None:
    limit = parse_limit(text)
    assert (limit.share, limit.size) == (share, size)
    assert limit.of(1000) == (size or int(1000 * share))


@pytest.mark.parametrize(
    "text", ["1.7", "abc", "0", "-1", "-2GiB", "0GiB", "", "80%", "2 apples", "nan", "inf", "1e9", "0.5B", "9" * 40 + "GiB"]
)
def test_other_amounts_are_refused_in_five_parts(store: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)Not an amount of memory\n  got: .*wanted: a share.*where:  --max-memory\n  to do: "):
        plan_memory(config(store), 1, text)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize(("base", "slope", "bend"), [(400, 0.01, 0.0), (1, 2.0, 0.0), (900, 1e-4, 0.0), (100, 0.001, 1e-7)])
def test_the_search_ends_just_below_the_limit(base: float, slope: float, bend: float, noise: float) -> None:
    random = np.random.default_rng(0)
    limit = 1000

    def peak(budget: int) -> float:
        return base + slope * budget + bend * budget * budget

    def weigh(budget: int) -> dict[str, int]:
        return {name: int(peak(budget) * (1 + noise * random.random())) for name in COMPOSITIONS}

    found = find_budget(weigh, 100, 10**8, limit, slope)
    assert max(found.peaks.values()) <= limit
    assert found.too_large <= CLOSE * found.max_tokens or max(found.peaks.values()) >= limit / CLOSE
    assert sum(budget == found.max_tokens for budget, _ in found.trials) >= 2
    assert len(found.trials) <= 16


def test_the_whole_view_may_fit_and_the_smallest_budget_may_not() -> None:
    found = find_budget(lambda budget: {"longest": budget}, 10, 500, 10_000, 1.0)
    assert (found.max_tokens, found.too_large) == (500, 0)
    with pytest.raises(ValueError, match=r"(?s)Not even the smallest budget fits.*2 MiB with 10 tokens.*longest histories.*at most 1 MiB"):
        find_budget(lambda _: {"longest": 2 * MIB, "typical": MIB}, 10, 500, MIB, 1.0)


def test_a_budget_that_fails_when_it_is_weighed_again_is_given_up() -> None:
    seen: list[int] = []

    def weigh(budget: int) -> dict[str, int]:
        seen.append(budget)
        return {"longest": budget + (200 if seen.count(budget) > 1 and budget > 700 else 0)}

    found = find_budget(weigh, 10, 10**6, 1000, 0.5)
    assert found.max_tokens <= 800
    assert max(found.peaks.values()) <= 1000


def test_compositions_of_a_full_rank() -> None:
    lengths = np.array([0, 9, 3, 1, 5, 0, 2])
    assert choose_samples(lengths, "longest", 14, None).tolist() == [1, 4, 5, 0]
    assert choose_samples(lengths, "shortest", 6, None).tolist() == [3, 6, 2, 0, 5]
    assert choose_samples(lengths, "shortest", 6, 2).tolist() == [3, 6]
    typical = choose_samples(lengths, "typical", 100, None)
    assert sorted(typical.tolist()) == list(range(7))
    assert typical.tolist() == choose_samples(lengths, "typical", 100, None).tolist()


def test_the_found_budget_keeps_to_the_limit_when_it_is_run_again(store: Path) -> None:
    """One search: its budget stays under the limit in fresh processes, and a tenth more comes near it or above."""
    run = config(store)
    low = max(room._CpuScales(run, 0, 2**40).weigh(100).values())
    limit = low // MIB + 100
    numbers = plan_memory(run, 1, f"{limit}MiB")
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["limit_bytes"] == limit * MIB
    assert set(numbers["peaks_bytes"]) == set(COMPOSITIONS)
    assert max(numbers["peaks_bytes"].values()) == numbers["peaks_bytes"][numbers["worst"]] <= limit * MIB
    assert numbers["config"] == f"batching: {{max_tokens: {numbers['max_tokens']}}}"
    assert 1000 < numbers["max_tokens"] < 80_000
    again, more = (room._CpuScales(run, 0, 2**40).weigh(budget) for budget in (numbers["max_tokens"], numbers["max_tokens"] * 11 // 10))
    assert max(again.values()) <= 1.03 * limit * MIB
    assert max(more.values()) >= 0.9 * limit * MIB
    text = describe_memory(numbers)
    for words in ("longest", "shortest", "typical", "largest budget", "are the worst", numbers["config"]):
        assert words in text


def test_a_limit_below_an_empty_process_is_refused(store: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)Not even the smallest budget fits.*at most 50 MiB.*--max-memory"):
        plan_memory(config(store), 1, "50MiB")


def test_sharded_tables_of_more_ranks_leave_room(tmp_path: Path) -> None:
    few = lengths_store(tmp_path, [int(n) for n in np.random.default_rng(0).integers(4, 60, 200)]).path
    run = config(few, model={"dim": 32}, tables={"shard_rows": 1}, batching={"global_tokens": 4096, "max_tokens": None})
    numbers = plan_memory(run, 4, "1.0")
    whole, quarter = 51 * 33 * 4, -(-51 * 33 * 4 // 4)
    assert numbers["saved_by_sharding_bytes"] == whole - quarter
    assert numbers["too_large"] == 0
    total = int(numbers["config"].split(": ")[-1].strip("}"))
    assert 0.95 * 4 * numbers["max_tokens"] < total <= 4 * numbers["max_tokens"]
    assert "4 ranks" in describe_memory(numbers)


def test_a_trial_that_the_kernel_kills_is_too_large(store: Path) -> None:
    scales = room._CpuScales(config(store), 0, 1000)
    ours, theirs = scales._context.Pipe(duplex=False)
    process = scales._context.Process(target=_killed, args=(theirs,))
    process.start()
    theirs.close()
    assert scales._wait(process, ours) > 1000
    process.join()


def _killed(pipe: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_trial_refuses_is_told(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No sample to try a step on"):
        plan_memory(config(lengths_store(tmp_path, [1, 1]).path), 1, "0.5")
    broken = config(store, tables={"max_gib_per_rank": 1e-7})
    with pytest.raises(ValueError, match="The tables do not fit"):
        room._CpuScales(broken, 0, 2**40).weigh(100)


@pytest.mark.gpu
def test_a_share_of_a_gpu_is_kept_to(store: Path) -> None:
    import torch

    whole = torch.cuda.get_device_properties(0).total_memory
    run = config(store, train={"device": "cuda", "precision": "bf16"}, encoder={"name": "sasrec", "num_layers": 8})
    numbers = plan_memory(run, 1, "0.05")
    assert numbers["limit_bytes"] == int(0.05 * whole)
    assert max(numbers["peaks_bytes"].values()) <= numbers["limit_bytes"]
    if numbers["too_large"]:
        assert max(numbers["peaks_bytes"].values()) > 0.8 * numbers["limit_bytes"]
