"""A bad number on any rank changes nothing on any rank, is named, and is counted; the guard itself changes no number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distrag.batch import load_batch
from distrag.config import read_config
from distrag.encoder.mean import Mean
from distrag.loss.binary import Binary
from distrag.training.build import Job, build_job
from distrag.training.guard import GROWTH_STEPS, Guard
from distrag.training.loop import run_job
from distrag.training.optim import build_optimizer
from distrag.training.step import StepResult, cut_batch, train_step
from distrag.world import start_world
from tests.embedding.test_tables import full_tables
from tests.ranks import run_ranks
from tests.training.runs import config, read_lines, write_histories
from tests.training.test_step import ROWS, build


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("guard") / "store", 60)


def state_of(job: Job, optimizer: Any) -> dict[str, np.ndarray]:
    """Returns all weights and this rank's optimizer states."""
    found = dict(full_tables(job.parallel.model))
    for name, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            pieces = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [torch.as_tensor(value)]
            found |= {f"{name}/{key}/{i}": piece.detach().numpy().copy() for i, piece in enumerate(pieces)}
    return found


def step(job: Job, optimizer: Any, guard: Guard | None, dealing: list[list[int]], number: int = 0, **options: Any) -> StepResult:
    own = np.array(dealing[job.world.rank], np.int64)
    batch = job.collate(job.views["train"], own, step=number, global_count=float(sum(map(len, dealing))))
    return train_step(job.parallel, optimizer, batch, job.world, guard=guard, **options)


class Spoils(nn.Module):
    """A head whose output one rank, or every rank, spoils in one step."""

    def __init__(self, head: nn.Module, value: float, rank: int) -> None:
        super().__init__()
        self.head, self.value, self.rank, self.on = head, value, rank, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x)
        return logits * self.value if self.on and dist.get_rank() == self.rank else logits


@pytest.mark.parametrize("table", [{"optimizer": "rowwise_adagrad"}, {"optimizer": "sgd"}, {"shard_rows": 100}])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_number_on_one_rank_leaves_tables_dense_part_and_states_of_all_ranks_as_they_are(
    tmp_path: Path, value: float, table: dict[str, Any]
) -> None:
    def go() -> tuple[float, int, float]:
        job = build(tmp_path, ROWS, task="conversion", tables=table)
        head = Spoils(job.parallel.plain.head, value, rank=1)
        job.parallel.plain.head = head
        optimizer, guard = build_optimizer(job.parallel, job.config.optim, job.config.tables), Guard(4.0, fixed=False)
        dealing = [[0, 4], [1, 2, 3]]
        assert not step(job, optimizer, guard, dealing).skipped
        before, head.on = state_of(job, optimizer), True
        assert step(job, optimizer, guard, dealing, 1).skipped
        after, head.on = state_of(job, optimizer), False
        assert before.keys() == after.keys()
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, err_msg=name)
        again = step(job, optimizer, guard, dealing, 1)
        assert not again.skipped
        assert any((state_of(job, optimizer)[name] != values).any() for name, values in before.items())
        return guard.scale, guard.num_skipped, float(again.loss_sum)

    for scale, num_skipped, loss in run_ranks(go, 2):
        assert (scale, num_skipped) == (2.0, 1)
        assert np.isfinite(loss)


def test_a_zero_table_stays_zero_when_the_loss_overflows_and_the_next_step_trains_it(tmp_path: Path) -> None:
    """The table is updated in the backward of its lookup: a check after that comes too late."""

    def go(value: float) -> tuple[np.ndarray, float, int, np.ndarray]:
        job = build(tmp_path, [[1]], task="conversion", tables={"init_std": 0.0, "optimizer": "rowwise_adagrad"})
        head = Spoils(job.parallel.plain.head, value, rank=0)
        job.parallel.plain.head, head.on = head, True
        optimizer, guard = build_optimizer(job.parallel, job.config.optim, job.config.tables), Guard(4.0, fixed=False)
        step(job, optimizer, guard, [[0]])
        tables, head.on = full_tables(job.parallel.model), False
        zero = next(values for name, values in tables.items() if name.endswith("item.weight"))
        scale, skipped = guard.scale, guard.num_skipped
        step(job, optimizer, guard, [[0]], 1)
        tables = full_tables(job.parallel.model)
        return zero, scale, skipped, next(values for name, values in tables.items() if name.endswith("item.weight"))

    for value in (float("inf"), float("nan")):
        zero, scale, skipped, trained = run_ranks(go, 1, value)[0]
        assert (zero == 0).all()
        assert (scale, skipped) == (2.0, 1)
        assert (trained[1] != 0).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "guard": {},
    "loss scale": {"scale": 1024.0},
    "two parts": {"micro_batches": 2},
    "more parts than samples": {"micro_batches": 9},
    "ids exchanged ahead": {"ahead": True},
    "all": {"scale": 1024.0, "micro_batches": 3, "ahead": True},
}
CASES: list[dict[str, Any]] = [
    {"task": "conversion", "encoder": {"name": "self_attention"}},
    {"encoder": {"name": "gru", "dropout": 0.3}, "loss": {"name": "sampled_softmax", "num_negatives": 4}},
    {"encoder": {"name": "sasrec", "dropout": 0.2}, "loss": {"name": "bce", "num_negatives": 3}},
    {"tables": {"shard_rows": 100}, "loss": {"name": "full_softmax"}, "encoder": {"name": "sasrec"}},
]


@pytest.mark.parametrize("changes", CASES)
def test_guard_loss_scale_micro_batches_and_lookups_ahead_change_no_number(tmp_path: Path, changes: dict[str, Any]) -> None:
    def train(options: dict[str, Any] | None) -> tuple[list[float], dict[str, np.ndarray], list[float]]:
        job = build(tmp_path, ROWS, **{**changes, "tables": {"optimizer": "adagrad", **changes.get("tables", {})}})
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        guard = None if options is None else Guard(options.get("scale", 1.0))
        dealings = [[[0, 4], [1, 2, 3]], [[0, 1, 2, 3, 4], []], [[3], [0, 1, 2, 4]]]
        view, world = job.views["train"], job.world
        dealt = [np.array(dealing[world.rank] if world.size == 2 else range(5), np.int64) for dealing in dealings]
        batches = [job.collate(view, own, step=number, global_count=13.0) for number, own in enumerate(dealt)]
        losses, norms = [], []
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            given = {"micro_batches": options["micro_batches"]} if options and "micro_batches" in options else {}
            ahead = following if options and options.get("ahead") else None
            result = train_step(job.parallel, optimizer, batch, world, guard=guard, following=ahead, **given)
            losses.append(float(world.all_reduce_sum(result.loss_sum)))
            norms.append(result.grad_norm if guard is not None else 0.0)
        return losses, full_tables(job.parallel.model), norms

    for world_size in (1, 2):

        def all_ways() -> list[Any]:
            return [train(None), *(train(options) for options in OPTIONS.values())]

        for plain, *others in run_ranks(all_ways, world_size):
            for name, (losses, weights, norms) in zip(OPTIONS, others, strict=True):
                exact = name in ("guard", "ids exchanged ahead")
                close = {"rtol": 0, "atol": 0 if exact else 1e-6}
                np.testing.assert_allclose(losses, plain[0], **{**close, "rtol": 0 if exact else 1e-6}, err_msg=name)
                np.testing.assert_allclose(norms, others[0][2], rtol=0 if exact else 1e-4, err_msg=name)
                for key, values in plain[1].items():
                    np.testing.assert_allclose(weights[key], values, **close, err_msg=f"{name}: {key}")


def test_parts_of_a_batch_hold_each_sample_once_with_its_own_ids(store: Path, tmp_path: Path) -> None:
    job = build_job(read_config(config(store, tmp_path / "run")), start_world("cpu"))
    batch = job.collate(job.views["train"], np.arange(20), global_count=1.0)
    parts = cut_batch(job.parallel, batch, 4)
    assert len(parts) == 4
    tokens = [part.num_tokens for part, _ in parts]
    assert max(tokens) < 0.5 * sum(tokens)
    for part, _ in parts:
        part.check(job.collate.table_rows)
    np.testing.assert_array_equal(torch.cat([part.samples for part, _ in parts]), batch.samples)
    np.testing.assert_array_equal(torch.cat([part.ids["item"].values() for part, _ in parts]), batch.ids["item"].values())
    for part, where in parts:
        np.testing.assert_array_equal(part.ids["item:negative"].values(), batch.ids["item:negative"].values())
        for key in ("item", "kind", "item:next"):
            np.testing.assert_array_equal(part.ids[key].values(), batch.ids[key].values()[where[key]])
    dist.destroy_process_group()


def spoil(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], method: str, change: Callable[[Any], Any], steps: range, rank: int
) -> None:
    """Lets a layer of one rank give bad numbers in the training steps named; what the step is run again for is spoilt alike."""
    original, calls = getattr(kind, method), [0, -1]

    def spoilt(self: Any, *given: Any) -> Any:
        out = original(self, *given)
        return change(out) if self.training and torch.is_grad_enabled() and current[0] in steps and dist.get_rank() == rank else out

    current = calls
    monkeypatch.setattr(kind, method, spoilt)

    from distrag.training import stepper

    run = stepper.train_step

    def counted(*given: Any, **options: Any) -> Any:
        current[0] = given[2].step
        return run(*given, **options)

    monkeypatch.setattr(stepper, "train_step", counted)


def test_a_skipped_step_is_named_with_layer_and_samples_and_its_batch_is_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(out: torch.Tensor) -> torch.Tensor:
        bad = torch.ones_like(out)
        bad[0] = torch.nan
        return out * bad

    spoil(monkeypatch, Mean, "forward", change, range(3, 4), rank=1)
    keys = {"encoder": {"name": "mean"}, "train__max_steps": 8, "optim__warmup_steps": 8}
    run = tmp_path / "run"
    run_ranks(lambda: run_job(build_job(read_config({**config(store, run), **_nest(config(store, run), keys)}), start_world("cpu"))), 2)
    lines = read_lines(run / "metrics.jsonl")
    skipped = [line for line in lines if line["kind"] == "skipped"]
    assert [line["step"] for line in skipped] == [4]
    assert skipped[0]["cause"].startswith("rank 1: output of encoder of sample(s) ")
    findings = json.loads((run / "bad_steps" / "step-000004.json").read_text())["findings"]
    assert [(finding["rank"], finding["kind"], finding["name"]) for finding in findings] == [(1, "forward", "encoder")]
    assert [path.name for path in (run / "bad_steps").glob("*.pt")] == ["step-000004-rank-1.pt"]
    batch = load_batch(run / "bad_steps" / "step-000004-rank-1.pt")
    batch.check()
    assert set(findings[0]["samples"]) <= set(batch.samples.tolist())
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, 9))
    assert trained[3]["loss"] is None
    assert trained[-1]["num_skipped"] == 1
    rates = [line["lr"] for line in trained]
    assert rates[4] == pytest.approx(rates[3]), "a skipped step does not advance the warm-up"
    assert rates[7] == pytest.approx(0.01 * 7 / 8)


def _nest(sections: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        out[section] = {**out.get(section, sections.get(section, {})), name: value} if name else value
    return out


def test_too_many_skipped_steps_in_a_row_stop_every_rank_with_the_report(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(out: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return out[0] * torch.inf, out[1]

    spoil(monkeypatch, Binary, "forward", change, range(2, 99), rank=0)
    run = tmp_path / "run"
    keys = {"task": "conversion", "loss": {"name": "binary"}, "encoder": {"name": "self_attention"}, "train__max_bad_steps": 3}
    keys |= {"data__split": {"kind": "row"}}
    sections = {**config(store, run), **_nest(config(store, run), keys)}

    def go() -> str:
        with pytest.raises(ValueError, match="Steps without finite numbers") as caught:
            run_job(build_job(read_config(sections), start_world("cpu")))
        return str(caught.value)

    first, second = run_ranks(go, 2, timeout_s=60)
    assert first == second
    assert "3 in a row" in first
    assert "rank 0: loss its sum (inf)" in first


HALF = [("sasrec", "fp16"), ("gru", "fp16"), ("sasrec", "bf16")]


def test_half_precision_trains_about_as_float32_does_and_finds_its_loss_scale(store: Path, tmp_path: Path) -> None:
    def losses(name: str, kind: str) -> list[float]:
        keys = {"encoder": {"name": name}, "train__precision": kind, "train__loss_scale": 2.0**20, "train__num_epochs": 12}
        sections = config(store, tmp_path / f"{name}-{kind}")
        return run_job(build_job(read_config({**sections, **_nest(sections, keys)}), start_world("cpu"))).losses

    runs = [*HALF, ("sasrec", "fp32"), ("gru", "fp32")]
    found = dict(zip(runs, run_ranks(lambda: [losses(*run) for run in runs], 1)[0], strict=True))
    for name, precision in HALF:
        assert np.mean(found[name, precision][-5:]) == pytest.approx(np.mean(found[name, "fp32"][-5:]), rel=0.1)
        last = [line for line in read_lines(tmp_path / f"{name}-{precision}" / "metrics.jsonl") if line["kind"] == "train"][-1]
        assert last["num_skipped"] == (np.log2(2.0**20 / last["loss_scale"]) if precision == "fp16" else 0)


def test_the_scale_grows_after_many_good_steps_and_its_state_goes_on_after_a_resume() -> None:
    guard = Guard(1024.0, fixed=False)
    assert all(guard.admit(finite=True) for _ in range(GROWTH_STEPS - 1))
    other = Guard(65536.0, fixed=False)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.scale == 1024.0
    assert other.admit(finite=True)
    assert (other.scale, other.good_steps) == (2048.0, 0)
    assert not other.admit(finite=False)
    assert (other.scale, other.num_skipped, other.num_updates) == (1024.0, 1, GROWTH_STEPS)
    fixed = Guard()
    fixed.load_state_dict(other.state_dict())
    assert (fixed.scale, fixed.num_skipped) == (1.0, 1), "a run that goes on in float32 has no scale"
    assert not fixed.admit(finite=False)
    assert fixed.scale == 1.0


def test_a_step_is_skipped_while_the_ids_of_the_next_one_are_under_way(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, Mean, "forward", lambda out: out * torch.nan, range(1, 3), rank=0)
    keys = {"encoder": {"name": "mean"}, "train__max_steps": 5, "train__pipeline": True}
    sections = config(store, tmp_path / "run")

    def go() -> list[float]:
        return run_job(build_job(read_config({**sections, **_nest(sections, keys)}), start_world("cpu"))).losses

    first, second = run_ranks(go, 2, timeout_s=60)
    assert first == second
    assert len(first) == 3
