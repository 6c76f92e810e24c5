"""What each rank takes for its own part of a step: the slow one is named, whatever makes it slow, and the others are not blamed."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distrag.config import read_config
from distrag.training.build import build_job
from distrag.training.loop import run_job
from distrag.training.timing import RankTimes, StepWatch, Tally, by_rank, imbalance
from distrag.world import start_world
from tests.ranks import run_ranks
from tests.training.runs import config, read_lines, write_histories

NAP_S = 0.1  # far above what a busy machine adds to a step of a few milliseconds


class _Napping:
    """A collate that naps before each batch, as one does that reads from a slow disk."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        time.sleep(NAP_S)
        return self.whole(*given, **named)


def nap(*_: Any) -> None:
    time.sleep(NAP_S)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("timing") / "store")


@pytest.mark.parametrize("where", ["encoder", "backward", "optimizer", "collate"])
@pytest.mark.parametrize("shard_rows", [1, 1000])
def test_the_rank_that_is_slow_is_named_and_the_one_that_waits_for_it_is_not(
    store: Path, tmp_path: Path, where: str, shard_rows: int
) -> None:
    def go() -> None:
        keys = {"train__max_steps": 8, "train__log_every": 4, "batching__prefetch": 0, "tables__shard_rows": shard_rows}
        job = build_job(read_config(config(store, tmp_path / "run", **keys)), start_world("cpu"))
        if job.world.rank == 1:
            if where == "encoder":
                job.parallel.plain.encoder.register_forward_pre_hook(nap)
            elif where == "backward":
                job.parallel.plain.encoder.register_full_backward_hook(nap)
            elif where == "optimizer":
                register_optimizer_step_pre_hook(nap)
            else:
                job = dataclasses.replace(job, collate=_Napping(job.collate))
        run_job(job)

    run_ranks(go, 2)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"][1:]
    assert [line["step"] for line in lines] == [4, 8]
    for line in lines[1:]:  # what the first steps compile is not of interest here
        assert line["slowest_rank"] == 1
        slow = line["rank_wait_s" if where == "collate" else "rank_step_s"]
        assert slow[1] > 0.9 * NAP_S
        assert slow[0] < slow[1]
        assert line["rank_exchange_s"][0] > line["rank_exchange_s"][1], "the fast rank waits for the slow one"
        if where != "collate":
            assert line["measured_imbalance"] > 1.3
        assert np.mean(line["rank_cost"]) == pytest.approx(1.0, abs=1e-5)
        assert sum(line["rank_tokens"]) == line["global_tokens"]
        assert max(line["rank_cost"]) == pytest.approx(line["imbalance"], abs=1e-5)


def test_one_rank_has_the_same_numbers(store: Path, tmp_path: Path) -> None:
    run_ranks(lambda: run_job(build_job(read_config(config(store, tmp_path / "run", train__max_steps=4)), start_world("cpu"))), 1)
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        if line["kind"] == "train":
            assert (line["rank_tokens"], line["rank_cost"], line["slowest_rank"]) == ([line["global_tokens"]], [1.0], 0)
            assert line["measured_imbalance"] == 1.0
            assert 0 < line["rank_step_s"][0] < 5
            assert line["rank_exchange_s"] == [0.0], "there is nobody to wait for"


def test_imbalance_is_what_the_slowest_rank_of_each_step_costs() -> None:
    turns = np.array([[3.0, 1.0], [1.0, 3.0]])
    assert imbalance(turns) == 1.5, "slow in turns is slow, though both ranks take as long in all"
    assert imbalance(np.ones((4, 3))) == 1.0
    assert imbalance(np.zeros((2, 0))) == 1.0
    assert imbalance(np.zeros((2, 5))) == 1.0


def test_few_ranks_are_listed_and_many_summed_up() -> None:
    assert by_rank(np.arange(64)) == list(range(64))
    assert by_rank(np.arange(65)) == {"min": 0.0, "mean": 32.0, "max": 64.0}
    assert json.loads(json.dumps(by_rank(np.arange(3, dtype=np.int64)))) == [0, 1, 2]


def test_a_slow_rank_is_remarked_on_with_its_cause() -> None:
    even = np.full((2, 4), 1.0)
    slow = np.array([[1.0] * 4, [2.0] * 4])
    assert RankTimes(even, even, even).remark() == ""
    assert RankTimes(slow, even, np.zeros((2, 4))).remark() == "rank 1 is slowest, 1.33x the mean"
    assert RankTimes(even, even, slow).remark() == "rank 1 is slowest, 1.20x the mean, 67% of it for its data"
    tally = Tally()
    assert tally.line() == ""
    tally.add(RankTimes(slow, even, 0 * even), 1.01)
    assert tally.line().startswith("imbalance of the ranks planned 1.0100 (cost), measured 1.3333 (own seconds); of a step 60.0% own")


def test_a_watch_splits_a_step_where_the_rank_waits_for_nobody() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, scale: float) -> dict[str, torch.Tensor]:
            time.sleep(0.02)
            return {"a": self.weight * scale, "b": _Slow.apply(self.weight * scale), "c": torch.zeros(2)}

    tables = Lookup()
    watch = StepWatch(tables, torch.device("cpu"))
    tables(1.0)  # outside of a step nothing is noted
    for _ in range(70):
        watch.begin()
        watch.end(0.5)
    assert watch.take().shape == (64, 3), "the last steps of a long stretch"
    watch.begin()
    vectors = tables(2.0)
    time.sleep(0.04)
    (vectors["a"] + vectors["b"]).sum().backward()
    watch.mark("backward")
    watch.end(0.5)
    own, exchange, wait = watch.take()[0].tolist()
    assert 0.04 <= own < 0.06
    assert exchange >= 0.05, "the lookup and its way back"
    assert wait == 0.5
    watch.close()


class _Slow(torch.autograd.Function):
    """Stands for a lookup whose gradient is exchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return grads[0]
