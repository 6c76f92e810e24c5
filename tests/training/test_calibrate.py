"""A cost fitted to real steps: longer histories cost more, it is written where training finds it, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distrag.config import RunConfig, read_config
from distrag.training import calibrate as room
from distrag.training.build import build_job
from distrag.training.calibrate import Timed, calibrate, choose_batches, describe_calibration, fit_cost, rank_budget
from distrag.training.cost import COST_FILE, read_cost
from distrag.training.plan import plan_run
from distrag.training.trial import Trial, take_samples
from distrag.world import open_world
from tests.batching.stores import lengths_store
from tests.ranks import RankError, run_ranks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).lognormal(3.6, 1.0, 600).astype(int).clip(4, 400)
    return lengths_store(tmp_path_factory.mktemp("calibrate"), [int(n) for n in lengths]).path


def config(store: Path, run_dir: Path, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"path": str(store), "max_len": 400},
        "batching": {"max_tokens": 1600, "prefetch": 0},
        "model": {"dim": 32},
        "encoder": {"name": "sasrec", "num_layers": 2, "dropout": 0.0},
        "loss": {"name": "bce"},
        "train": {"num_epochs": 1, "device": "cpu", "run_dir": str(run_dir)},
    }
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return read_config({**base, **merged})


def check_calibration(run: RunConfig, device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(room, "SECONDS", 5.0)
    monkeypatch.setattr(room, "CHECK_SECONDS", 0.2)
    numbers = calibrate(run, 1)
    run_dir = Path(run.train.run_dir)
    assert [path.name for path in run_dir.iterdir()] == [COST_FILE]
    fitted = read_cost(run_dir)
    assert fitted is not None
    assert list(fitted.cost) == numbers["cost"]
    assert fitted.device == device
    a, b, c = fitted.cost
    assert min(a, b, c, fitted.constant_s) >= 0

    def seconds(length: int) -> float:
        return a * length + b * length * length + c

    assert seconds(400) > 4 * seconds(40) > 0
    assert numbers["error_mean"] < 0.5
    return numbers


def test_longer_histories_cost_more_and_training_and_plan_find_the_cost(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(store, tmp_path / "runs" / "run")
    numbers = check_calibration(run, "cpu", monkeypatch)
    assert set(numbers["balance"]) == {"arithmetic", "fitted"}
    for balance in numbers["balance"].values():
        assert set(balance) == {"planned", "predicted", "measured", "noise"}
        assert all(value >= 1.0 for value in balance.values())
        assert balance["planned"] < 1.05
    assert numbers["ranks"] == 4
    assert json.loads(json.dumps(numbers)) == numbers
    text = describe_calibration(numbers)
    for words in ("measured ms", "cost of a history", "error of the fit", "by the fit", "by arithmetic", COST_FILE):
        assert words in text
    planned = plan_run(run, 2, planner_s=0)
    assert planned["cost"] == numbers["cost"]
    assert planned["cost_from"].startswith("fitted on")
    other = plan_run(config(store, tmp_path / "runs" / "run", model={"dim": 16}), 2, planner_s=0)
    assert "another model" in other["cost_from"]


@pytest.mark.gpu
def test_costs_are_fitted_on_a_gpu_too(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(store, tmp_path / "run", train={"device": "cuda", "precision": "bf16"}, batching={"max_tokens": 16_000})
    check_calibration(run, "cuda", monkeypatch)


def test_steps_change_no_weight(store: Path, tmp_path: Path) -> None:
    run = config(store, tmp_path, tables={"shard_rows": 1}, optim={"weight_decay": 0.1})
    with open_world("cpu") as world:
        job = build_job(run, world)
        ((_, _, table),) = job.parallel.item_shards("item_id")
        weights = {"table": table, **job.parallel.dense}
        before = {name: value.detach().clone() for name, value in weights.items()}
        trial = Trial(job)
        for samples in (np.arange(20), np.zeros(0, np.int64)):
            batch = trial.batch(samples)
            assert trial.seconds(batch) > 0
        assert len(before) > 10
        assert all(torch.equal(value, before[name]) for name, value in weights.items())


def test_known_coefficients_come_back_from_their_own_times(store: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 300, int(random.integers(1, 60))).astype(float) for _ in range(20)]
    sums = np.array([[its.sum(), (its * its).sum(), len(its), 1.0] for its in lengths])
    made = np.array([2e-6, 3e-9, 1e-5, 4e-3])
    found = fit_cost(config(store, tmp_path), Timed(sums, sums @ made, 3), torch.device("cpu"))
    assert [*found.cost, found.constant_s] == pytest.approx(made.tolist(), rel=1e-6)
    assert found.error_max < 1e-6


def test_times_that_depend_on_nothing_are_refused(store: Path, tmp_path: Path) -> None:
    sums = np.array([[10.0, 100.0, 1.0, 1.0], [20.0, 200.0, 2.0, 1.0]])
    with pytest.raises(ValueError, match=r"(?s)does not depend on what it holds.*2 batches.*to do"):
        fit_cost(config(store, tmp_path), Timed(sums, np.array([0.1, 0.1]), 3), torch.device("cpu"))


def test_batches_are_of_about_one_length_and_keep_to_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(0, 200, 500)
    batches = choose_batches(lengths, 1000, 40)
    assert all(lengths[samples].sum() <= 1100 for samples in batches)
    assert all(1 <= len(samples) <= 40 for samples in batches)
    narrow = [samples for samples in batches[:-3] if lengths[samples].max() > 40]
    assert len(narrow) >= 6
    assert all(lengths[samples].max() <= 1.25 * lengths[samples].min() for samples in narrow)
    assert len({(lengths[samples].max(), len(samples)) for samples in batches}) > 8


def test_samples_fill_a_budget_in_their_order() -> None:
    lengths = np.array([5, 4, 3, 2, 1, 0])
    order = np.arange(6)
    assert take_samples(lengths, order, 5, 9).tolist() == [0, 5]
    assert take_samples(lengths, order, 8, 9).tolist() == [0, 2, 5]
    assert take_samples(lengths, order, 10, 9).tolist() == [0, 1, 4, 5]
    assert take_samples(lengths, order, 100, 2).tolist() == [0, 1]
    assert take_samples(lengths, order[::-1], 3, 9).tolist() == [5, 4, 3]
    assert take_samples(lengths, order[:0], 3, 9).tolist() == []


def test_the_budget_of_a_rank(store: Path, tmp_path: Path) -> None:
    assert rank_budget(config(store, tmp_path), 8, 400) == 1600
    shared = config(store, tmp_path, batching={"global_tokens": 8000})
    assert rank_budget(shared, 4, 400) == 2000
    assert rank_budget(shared, 1000, 400) == 400


def test_mistakes_are_told_in_five_parts(store: Path, tmp_path: Path) -> None:
    empty = lengths_store(tmp_path, [1, 1, 1]).path
    with pytest.raises(ValueError, match=r"(?s)No sample to try a step on.*3 samples, all of length 0.*the train view"):
        calibrate(config(empty, tmp_path / "run"), 1)
    with pytest.raises(ValueError, match=r"(?s)out of range.*--world-size"):
        calibrate(config(store, tmp_path / "run"), 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="run directory cannot be made"):
        calibrate(config(store, tmp_path / "file" / "run"), 1)


def test_it_runs_in_one_process_only(store: Path, tmp_path: Path) -> None:
    run = config(store, tmp_path)
    with pytest.raises(RankError, match=r"(?s)Trial steps run in one process.*2 ranks"):
        run_ranks(lambda: calibrate(run, 2), 2)
