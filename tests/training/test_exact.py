"""Whole runs, evaluated and saved: N ranks come to what one comes to, uneven and empty ranks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distrag.config import read_config
from distrag.data.write import write_store
from distrag.training.build import build_job, build_sampler
from distrag.training.loop import run_job, train
from distrag.world import start_world
from tests.embedding.test_tables import full_tables
from tests.ranks import run_ranks

MAX_LEN = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few samples of very different lengths, none and one among them, several features, weights, labels, unknown items."""
    random = np.random.default_rng(5)
    lengths = np.concatenate([[0, 1, 2, 30, 0, 3], random.integers(0, 25, 34)])
    total = int(lengths.sum())
    path = tmp_path_factory.mktemp("exact") / "store"
    write_store(
        path,
        history={
            "item": random.zipf(1.4, total) % 60,
            "kind": random.integers(0, 7, total),
            "price": random.normal(size=total).astype(np.float32),
            "time": random.integers(0, 10**6, total).cumsum(),
        },
        offsets=np.concatenate([[0], lengths.cumsum()]),
        context={"age": random.integers(0, 9, len(lengths)), "income": random.normal(size=len(lengths)).astype(np.float32)},
        label=random.integers(0, 2, len(lengths)),
        weight=random.uniform(0.5, 2.0, len(lengths)).astype(np.float32),
        features={"time": {"kind": "time", "gap": "bucket"}},
    )
    return path


def config(store: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "task": "next_item",
        "data": {"path": str(store), "max_len": MAX_LEN},
        "batching": {"global_tokens": 40, "prefetch": 1},
        "model": {"dim": 16},
        "encoder": {"name": "gru"},
        "loss": {"name": "sampled_softmax", "num_negatives": 8},
        "tables": {"shard_rows": 1, "optimizer": "rowwise_adagrad"},
        "optim": {"lr": 0.002, "table_lr": 0.05, "warmup_steps": 4, "schedule": "cosine", "eps": 1e-5},  # rounding stays what it is
        "train": {"max_steps": 30, "log_every": 1, "eval_every": 30, "run_dir": str(run_dir), "tensorboard": False, "device": "cpu"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            sections[section][name] = value
        else:
            sections[section] = value
    return sections


def train_here(sections: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray], dict[str, Any], int]:
    """Runs the whole command's training on this rank; returns losses, final state, test metrics and the ranks that sat out a step."""
    job = build_job(read_config(sections), start_world("cpu"))
    plan = build_sampler(job).plan
    dummies = sum(int((plan.rank_samples(step) == 0).sum()) for step in range(plan.num_steps))
    result = run_job(job)
    return result.losses, full_tables(job.parallel.model), result.test, dummies


CASES: list[dict[str, Any]] = [
    {"encoder": {"name": "sasrec", "dropout": 0.3}},
    {"encoder": {"name": "gru", "num_layers": 2, "dropout": 0.2}, "batching__global_tokens": 24},  # fewer samples than ranks
    {
        "encoder": {"name": "self_attention"},
        "task": "conversion",
        "loss": {"name": "binary"},
        "data__split": {"kind": "row"},
        "tables__shard_rows": 10,
    },
]


def test_a_whole_run_comes_to_the_same_losses_state_and_metrics_on_any_number_of_ranks(store: Path, tmp_path: Path) -> None:
    """With evaluation, checkpoints and dropout; `tests/exact` compares every encoder, loss, sharding and optimizer with a reference."""

    def all_cases() -> list[Any]:
        return [train_here(config(store, tmp_path / f"{dist.get_world_size()}-{i}", **case)) for i, case in enumerate(CASES)]

    one = run_ranks(all_cases, 1, timeout_s=200)[0]
    sat_out = 0
    for world in (2, 4):
        for ranks in run_ranks(all_cases, world, timeout_s=280):
            for case, (losses, state, test, dummies), (losses1, state1, test1, _) in zip(CASES, ranks, one, strict=True):
                sat_out += dummies
                assert len(losses) == 30
                np.testing.assert_allclose(losses, losses1, rtol=0, atol=1e-6, err_msg=f"{world} ranks, {case}")
                for name, values in state1.items():
                    np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6, err_msg=f"{world} ranks, {case}, {name}")
                assert test.keys() == test1.keys()
                found, wanted = ([v for v in metrics.values() if v is not None] for metrics in (test, test1))
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert sat_out > 0, "some rank had no sample in some step"


def test_training_lowers_the_loss_and_debug_mode_gives_the_same_numbers(store: Path, tmp_path: Path) -> None:
    plain = train(config(store, tmp_path / "plain"))
    debug = train({**config(store, tmp_path / "debug"), "debug": True})
    assert plain.losses == pytest.approx(debug.losses, abs=1e-6)
    assert np.mean(plain.losses[-5:]) < np.mean(plain.losses[:5])
