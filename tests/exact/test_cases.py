"""Small cases with known outcomes, out of reports of people who trained sequence models on ragged data: what other tests cover by half."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distrag import ragged
from distrag.config import read_config
from distrag.data.write import write_store
from distrag.embedding.config import SHARDINGS, TablesConfig, TableSpec, build_shardings
from distrag.embedding.plan import build_placements, build_plan
from distrag.embedding.tables import Tables
from distrag.encoder import ENCODERS
from distrag.encoder.mean import Mean, MeanConfig
from distrag.loss import LOSSES
from distrag.loss.targets import NextItemTargets
from distrag.training.build import build_job
from distrag.training.optim import build_optimizer
from distrag.training.step import train_step
from distrag.world import start_world
from tests.embedding.test_tables import full_tables
from tests.encoder.sequences import VARIANTS, build, inputs
from tests.ranks import run_ranks
from tests.training.test_step import build as build_small
from tests.training.test_step import dense_after


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_an_empty_neighbour_changes_no_gradient_with_the_kernels_and_without(
    variant: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that CUDA takes too: where rectangles are padded, the empty row is one that is masked as a whole."""
    if not kernels:
        monkeypatch.setattr(ragged, "has_kernel", lambda *tensors: False)
    alone, (x, offsets) = build(variant), inputs([3, 0, 2, 0])
    beside = copy.deepcopy(alone)
    y = x.detach().clone().requires_grad_()
    pooled, states = beside.pool(x, offsets), beside(x, offsets)
    assert (pooled[[1, 3]] == 0).all()
    (pooled[0].sum() + states.square().sum()).backward()
    without = torch.tensor([0, 3, 5])
    (alone.pool(y, without)[0].sum() + alone(y, without).square().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-6)
    for a, b in zip(alone.parameters(), beside.parameters(), strict=True):
        assert b.grad is not None
        assert b.grad.isfinite().all()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


class Scaled(Mean):
    """A state is its event times one weight, which starts at 1."""

    def __init__(self, config: MeanConfig, dim: int, max_len: int) -> None:
        super().__init__(config, dim, max_len)
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        return x * self.w


@dataclass(frozen=True)
class NoConfig:
    """Nothing to set."""


class Plain(nn.Module):
    """The loss of a position is the first number of its state."""

    negatives: ClassVar[str] = "none"
    needs_table: ClassVar[bool] = False
    task: ClassVar[str] = "next_item"
    Config: ClassVar[type[NoConfig]] = NoConfig

    def __init__(self, config: NoConfig) -> None:
        super().__init__()

    def forward(self, targets: NextItemTargets) -> tuple[Tensor, Tensor]:
        weights = targets.target_weights()
        return (targets.states[:, 0] * weights).sum(), weights.sum()


def test_three_tokens_of_loss_1_and_one_of_loss_5_on_another_rank_are_a_mean_of_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "scaled", Scaled)  # type: ignore[arg-type]
    monkeypatch.setitem(LOSSES, "plain", Plain)  # type: ignore[arg-type]

    def learn(dealing: list[list[int]]) -> tuple[float, float]:
        job = build_small(tmp_path, [[1, 1, 1, 1], [2, 1]], encoder={"name": "scaled"}, loss={"name": "plain"})
        for first, _column, piece in job.parallel.item_shards("item"):
            for row in range(len(piece)):
                piece[row] = {1: 1.0, 2: 5.0}.get(first + row, 0.0)
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        batch = job.collate(job.views["train"], np.array(dealing[job.world.rank], np.int64), global_count=4.0)
        result = train_step(job.parallel, optimizer, batch, job.world)
        gradient = next(p.grad for name, p in job.parallel.dense.items() if name.endswith("encoder.w"))
        assert gradient is not None
        return float(job.world.all_reduce_sum(result.loss_sum.clone())) / 4.0, float(gradient)

    for dealing in ([[0, 1]], [[0], [1]], [[0], [], [1]]):
        for loss, gradient in run_ranks(learn, len(dealing), dealing):
            assert loss == pytest.approx(2.0, abs=1e-6), "not 3, the mean of the ranks' means"
            assert gradient == pytest.approx(2.0, abs=1e-6)


def test_a_rank_of_ignored_targets_leaves_the_state_that_the_other_rank_comes_to_alone(tmp_path: Path) -> None:
    rows, changes = [[1, 2, 3], [0, 0, 0]], {"tables": {"optimizer": "sgd"}}  # an adaptive optimizer would hide a wrong factor
    loss_alone, alone = run_ranks(lambda: dense_after(build_small(tmp_path, rows, **changes), [[0]]), 1)[0]
    for loss, state in run_ranks(lambda: dense_after(build_small(tmp_path, rows, **changes), [[0], [1]]), 2):
        assert loss == pytest.approx(loss_alone, abs=1e-6)
        for name, values in alone.items():
            np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("empty", [[2], []], ids=["a sample without tokens", "no sample"])
def test_a_rank_with_nothing_to_look_up_gets_nothing_and_the_other_what_it_gets_alone(tmp_path: Path, empty: list[int]) -> None:
    def look(sharding: str, dealing: list[list[int]]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        changes = {"tables": {"sharding": sharding, "optimizer": "sgd"}, "model": {"dim": 8}, "task": "conversion"}
        job = build_small(tmp_path, [[1, 2, 2], [5], []], **changes)
        own = np.array(dealing[job.world.rank], np.int64)
        vectors = job.parallel.plain.tables(job.collate(job.views["train"], own).ids)["item"].detach().numpy().copy()
        logits = job.parallel.plain.predict(job.collate(job.views["train"], own)).detach().numpy()
        return vectors, logits, dense_after(job, dealing)[1]

    def look_all(dealing: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        return [look(sharding, dealing) for sharding in SHARDINGS]

    expected = run_ranks(look_all, 1, [[0, 1, *empty]])[0]
    full, idle = run_ranks(look_all, 2, [[0, 1], empty])
    for sharding, alone, (vectors, logits, state), (nothing, dummy, other) in zip(SHARDINGS, expected, full, idle, strict=True):
        assert nothing.shape == (0, 8), sharding
        assert dummy.shape == (1,), "of the sample or a dummy: the graph is the same on all ranks"
        np.testing.assert_array_equal(vectors, alone[0])
        np.testing.assert_allclose(logits, alone[1][:2], rtol=0, atol=1e-6, err_msg=sharding)
        for name, values in alone[2].items():
            np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6, err_msg=f"{sharding}, {name}")
            np.testing.assert_array_equal(other[name], state[name])


def test_replicas_start_and_stay_bit_equal_though_every_rank_seeds_otherwise(tmp_path: Path) -> None:
    def learn() -> list[dict[str, np.ndarray]]:
        torch.manual_seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        job = build_small(tmp_path, [[1, 2, 3, 4], [5, 6], [7], []], tables={"shard_rows": 100}, encoder={"name": "gru"})
        before = {name: p.detach().numpy().copy() for name, p in job.parallel.dense.items()}
        dense_after(job, [[0], [1, 2], [3]], num_steps=5)
        return [before, {name: p.detach().numpy() for name, p in job.parallel.dense.items()}]

    first, *others = run_ranks(learn, 3)
    assert any("tables.replicated" in name for name in first[0])
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for name, values in mine.items():
                np.testing.assert_array_equal(theirs[name], values, err_msg=name)
    assert all((first[0][name] != first[1][name]).any() for name in first[0] if name.endswith("weight"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plan_holds_every_sharded_table_and_no_other(world_size: int) -> None:
    specs = [TableSpec(name, rows, (name,)) for name, rows in (("a", 100), ("b", 90), ("c", 80), ("small", 7))]
    config = TablesConfig(shard_rows=50, optimizer="sgd", per_table={"b": "table_wise", "c": "column_wise"})
    shardings = build_shardings(specs, config)
    tables = Tables(specs, shardings, 16, init_std=1.0, seed=0)
    assert tables.sharded is not None
    placements = build_placements(specs, shardings, 16, world_size, config)
    assert sorted(p.table for p in placements) == ["a", "b", "c", "small"]
    plan = build_plan("tables.sharded", tables.sharded, placements, world_size, world_size, "cpu")
    assert sorted(plan.plan["tables.sharded"]) == ["a", "b", "c"]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_debug_mode_one_rank_and_two_agree_on_loss_and_whole_tables_after_every_step(tmp_path: Path, optimizer: str) -> None:
    random = np.random.default_rng(2)
    lengths = random.integers(1, 9, 12)
    items = random.integers(1, 32, int(lengths.sum())) % 9 + 1  # ids repeat inside a batch
    write_store(tmp_path / "store", history={"item": items}, offsets=np.concatenate([[0], lengths.cumsum()]), tables={"item": 32})

    def learn(debug: bool) -> list[tuple[float, dict[str, np.ndarray]]]:
        sections: dict[str, Any] = {
            "data": {"path": str(tmp_path / "store"), "max_len": 8, "split": {"kind": "row", "valid_share": 0.0, "test_share": 0.0}},
            "model": {"dim": 8},
            "encoder": {"name": "gru"},
            "loss": {"name": "sampled_softmax", "num_negatives": 4},
            "tables": {"shard_rows": 1, "optimizer": optimizer},
            "optim": {"table_lr": 0.5 if optimizer == "sgd" else 0.05},
            "train": {"max_steps": 5, "device": "cpu"},
            "debug": debug,
        }
        job = build_job(read_config(sections), start_world("cpu"))
        built, view, found = build_optimizer(job.parallel, job.config.optim, job.config.tables), job.views["train"], []
        for step in range(5):
            every = np.arange(12)[step % 2 :: 1 + step % 2]
            count = float(job.collate.counts(view)[every].sum())
            batch = job.collate(view, every[job.world.rank :: job.world.size], step=step, global_count=count)
            loss = train_step(job.parallel, built, batch, job.world).loss_sum
            found.append((float(job.world.all_reduce_sum(loss.clone())) / count, full_tables(job.parallel.model)))
        return found

    expected = run_ranks(learn, 1, True)[0]
    for ranks in (run_ranks(learn, 1, False), run_ranks(learn, 2, False)):
        for found in ranks:
            for (loss, state), (wanted, tables) in zip(found, expected, strict=True):
                assert loss == pytest.approx(wanted, abs=1e-6)
                for name, values in tables.items():
                    np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6, err_msg=name)
