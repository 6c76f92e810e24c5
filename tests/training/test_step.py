"""One step: the division by the global count, ranks without targets, and rates that reach fused tables without a lag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distrag import ragged
from distrag.checkpoint import load_checkpoint, save_checkpoint
from distrag.config import OptimConfig, read_config
from distrag.data.write import write_store
from distrag.embedding.config import TablesConfig
from distrag.encoder import ENCODERS
from distrag.training.build import Job, build_job
from distrag.training.guard import Guard
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.step import train_step
from distrag.world import start_world
from tests.embedding.test_tables import full_tables, jagged, shard
from tests.ranks import run_ranks


def build(tmp_path: Path, rows: list[list[int]], **changes: Any) -> Job:
    """Returns a job over the given histories; every rank writes a store of its own."""
    path = tmp_path / f"store-{dist.get_rank() if dist.is_initialized() else 0}-{len(changes)}"
    if not path.exists():
        lengths = np.array([len(row) for row in rows])
        arrays: dict[str, Any] = {"label": np.arange(len(rows)) % 2}
        items = np.array([item for row in rows for item in row], np.int64)
        write_store(path, history={"item": items}, offsets=np.concatenate([[0], lengths.cumsum()]), tables={"item": 8}, **arrays)
    sections: dict[str, Any] = {
        "data": {"path": str(path), "max_len": 10, "split": {"kind": "row", "valid_share": 0.0, "test_share": 0.0}},
        "model": {"dim": 4, "head_hidden": []},
        "encoder": {"name": "mean"},
        "tables": {"shard_rows": 1, "init_std": 1.0},
        "train": {"max_steps": 1, "device": "cpu"},
    }
    for key, value in changes.items():
        sections[key] = {**sections[key], **value} if isinstance(value, dict) and key in sections else value
    return build_job(read_config(sections), start_world("cpu"))


def dense_after(job: Job, samples_of_rank: list[list[int]], num_steps: int = 3) -> tuple[float, dict[str, np.ndarray]]:
    """Trains some steps with the dealing given; returns the last global loss and every parameter."""
    optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
    view, world = job.views["train"], job.world
    every = np.array([s for own in samples_of_rank for s in own], np.int64)
    count = float(job.collate.counts(view)[every].sum())
    loss = 0.0
    for step in range(num_steps):
        own = np.array(samples_of_rank[world.rank], np.int64)
        batch = job.collate(view, own, step=step, global_count=count)
        result = train_step(job.parallel, optimizer, batch, world)
        loss = float(world.all_reduce_sum(result.loss_sum.clone())) / max(count, 1.0)
    return loss, full_tables(job.parallel.model)


ROWS = [[1, 2, 3, 4], [5, 6], [7], [], [2, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize("task", ["conversion", "next_item"])
def test_a_target_weighs_the_same_whichever_rank_it_lands_on(tmp_path: Path, task: str) -> None:
    # SGD tables: an adaptive optimizer would hide a wrong factor of the gradient.
    changes = {"task": task, "optim": {"lr": 0.1}, "tables": {"optimizer": "sgd"}}
    expected = run_ranks(lambda: dense_after(build(tmp_path, ROWS, **changes), [[0, 1, 2, 3, 4]]), 1)[0]
    for dealing in ([[0, 4], [1, 2, 3]], [[0, 1, 2, 3, 4], []], [[3], [0, 1, 2, 4]]):
        for loss, state in run_ranks(lambda dealing=dealing: dense_after(build(tmp_path, ROWS, **changes), dealing), 2):
            assert loss == pytest.approx(expected[0], abs=1e-6)
            for name, values in expected[1].items():
                np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6, err_msg=f"{name}, {dealing}")


def test_the_gradient_that_the_dense_part_sees_does_not_depend_on_the_dealing(tmp_path: Path) -> None:
    def norm(dealing: list[list[int]]) -> float:
        job = build(tmp_path, ROWS, task="conversion")
        optimizer, view = build_optimizer(job.parallel, job.config.optim, job.config.tables), job.views["train"]
        batch = job.collate(view, np.array(dealing[job.world.rank], np.int64), global_count=5.0)
        return float(train_step(job.parallel, optimizer, batch, job.world, guard=Guard()).grad_norm)

    expected = run_ranks(norm, 1, [[0, 1, 2, 3, 4]])[0]
    assert expected > 0
    for found in run_ranks(norm, 2, [[0, 4], [1, 2, 3]]):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_a_rank_without_a_position_stays_in_step_where_no_compiled_kernel_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that CUDA takes: ranks that leave parameters without a gradient make the others wait for ever."""
    monkeypatch.setattr(ragged, "has_kernel", lambda *tensors: False)
    dealing = [[0, 1], [3]]
    found = run_ranks(lambda: dense_after(build(tmp_path, ROWS, task="conversion", encoder={"name": name}), dealing), 2, timeout_s=60)
    assert found[0][0] == found[1][0]


def test_training_goes_on_after_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def steps(job: Job, optimizer: Any, first: int, last: int) -> list[float]:
        batches = [job.collate(job.views["train"], np.arange(5), step=step, global_count=5.0) for step in range(first, last)]
        return [float(train_step(job.parallel, optimizer, batch, job.world).loss_sum) for batch in batches]

    def go(changes: dict[str, Any]) -> tuple[list[float], list[float]]:
        job = build(tmp_path, ROWS, task="conversion", **changes)
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        steps(job, optimizer, 0, 4)
        save_checkpoint(tmp_path / f"point-{changes['tables']['shard_rows']}", job.parallel, optimizer, {"step": 4}, job.world)
        straight = steps(job, optimizer, 4, 9)
        again = build(tmp_path, ROWS, task="conversion", **changes)
        fresh = build_optimizer(again.parallel, again.config.optim, again.config.tables)
        found = load_checkpoint(tmp_path / f"point-{changes['tables']['shard_rows']}", again.parallel, fresh, again.world)
        assert found == {"step": 4}
        return straight, steps(again, fresh, 4, 9)

    for optimizer in ("rowwise_adagrad", "adagrad", "sgd"):
        for shard_rows in (1, 100):
            tables = {"optimizer": optimizer, "shard_rows": shard_rows}
            for straight, resumed in run_ranks(go, 2, {"tables": tables, "optim": {"name": "adamw", "lr": 0.1, "weight_decay": 0.1}}):
                assert resumed == pytest.approx(straight, abs=1e-6)


def test_a_rank_whose_targets_are_all_unknown_adds_nothing_and_stays_in_step(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    alone = run_ranks(lambda: dense_after(build(tmp_path, rows), [[0]]), 1)[0]
    for loss, state in run_ranks(lambda: dense_after(build(tmp_path, rows), [[0], [1]]), 2):
        assert loss == pytest.approx(alone[0], abs=1e-6)
        assert all(np.isfinite(values).all() for values in state.values())


def test_a_step_without_any_target_changes_nothing_and_gives_no_nan(tmp_path: Path) -> None:
    job = build(tmp_path, [[0, 0, 0], [0, 0]], optim={"name": "adam"})
    before = full_tables(job.parallel.model)
    loss, after = dense_after(job, [[0, 1]])
    assert loss == 0.0
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
    dist.destroy_process_group()


def test_item_0_of_the_catalogue_is_no_padding_and_learns(tmp_path: Path) -> None:
    def learn() -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        job = build(tmp_path, [[1], [], [1, 2]], task="conversion")
        batch = job.collate(job.views["train"], np.arange(3))
        logits = job.parallel.plain.predict(batch).detach().numpy()
        before = full_tables(job.parallel.model)
        return logits, before, dense_after(job, [[0, 1, 2]])[1]

    logits, before, after = run_ranks(learn, 1)[0]
    assert abs(logits[0] - logits[1]) > 1e-6, "raw item 0 sits in row 1 and is told from an empty history"
    item = next(name for name in before if name.endswith("item.weight"))
    moved = np.abs(after[item] - before[item]).max(1)
    assert moved[1] > 0
    assert (moved[[0, 3, 4, 5, 6, 7]] == 0).all(), "rows that no history holds stay"


def test_weight_decay_moves_no_row_of_a_table(tmp_path: Path) -> None:
    def learn() -> tuple[np.ndarray, np.ndarray]:
        job = build(tmp_path, ROWS, task="conversion", tables={"shard_rows": 100}, optim={"name": "adamw", "lr": 0.1, "weight_decay": 0.1})
        name = "tables.replicated.embeddings.item.weight"
        before = full_tables(job.parallel.model)[name]
        return before, dense_after(job, [[0, 1]], num_steps=10)[1][name]

    before, after = run_ranks(learn, 1)[0]
    np.testing.assert_array_equal(after[[0, 7]], before[[0, 7]])
    assert after.std() > 0


@pytest.mark.parametrize("numba", [True, False])
def test_a_rate_reaches_a_fused_table_in_the_very_step_it_is_set_for(numba: bool) -> None:
    def learn() -> list[np.ndarray]:
        dmp = shard(TablesConfig(shard_rows=1, optimizer="sgd"), lr=1.0, numba=numba)
        optimizer, order = dmp.fused_optimizer, dmp.module.tables.key_order
        schedule = Schedule(optimizer, OptimConfig(warmup_steps=4), 10)
        states = [next(v for k, v in full_tables(dmp).items() if k.endswith("item.weight"))]
        for step, item in enumerate((3, 4)):
            schedule.set(step)
            optimizer.zero_grad()
            out = dmp(jagged({"item": [[item]], "item:next": [[]], "kind": [[]]}, order))
            out["item"].sum().backward()
            optimizer.step()
            states.append(next(v for k, v in full_tables(dmp).items() if k.endswith("item.weight")))
        return states

    start, first, second = run_ranks(learn, 1)[0]
    np.testing.assert_allclose(first[3] - start[3], -0.25, atol=1e-6)
    np.testing.assert_allclose(second[4] - first[4], -0.5, atol=1e-6)
    np.testing.assert_array_equal(second[3], first[3])


def test_pooling_over_row_wise_shards_counts_the_whole_history(tmp_path: Path) -> None:
    def pool(name: str) -> np.ndarray:
        job = build(tmp_path, [[1, 2, 3, 4], [5, 5]], task="conversion", encoder={"name": name})
        for _row, _col, piece in job.parallel.item_shards("item"):
            piece.fill_(2.0)
        batch = job.collate(job.views["train"], np.arange(2))
        vectors = job.parallel.plain.tables(batch.ids)["item"]
        return job.parallel.plain.encoder.pool(vectors, batch.offsets).detach().numpy()

    for world in (1, 2):
        for found in run_ranks(pool, world, "mean"):
            np.testing.assert_array_equal(found, np.full((2, 4), 2.0))
        for found in run_ranks(pool, world, "sum"):
            np.testing.assert_array_equal(found[:, 0], [8.0, 4.0])


def test_histories_that_are_all_empty_train_the_head_without_nan(tmp_path: Path) -> None:
    loss, state = run_ranks(lambda: dense_after(build(tmp_path, [[], [], []], task="conversion"), [[0, 1, 2]]), 1)[0]
    assert np.isfinite(loss)
    assert all(np.isfinite(values).all() for values in state.values()), "histories that are all empty train the head only"
