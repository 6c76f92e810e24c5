"""A new run starts from the weights of another one, tables and dense part and nothing else; refused where they mean another thing."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distrag.checkpoint.manifest import Manifest, read_manifest, write_manifest
from distrag.training.loop import train
from tests.ranks import run_ranks
from tests.training.kills import children_of, launch_torchrun
from tests.training.reshard import read_tensors
from tests.training.runs import Reaches, config, faults_of, losses_of, read_lines, write_histories
from tests.training.test_evaluate_run import ring, sections

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("init") / "store", NUM_SAMPLES)


@pytest.fixture(scope="module")
def first(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("first") / "run"
    run_ranks(lambda: train(config(store, run, train__num_epochs=1)), 2)
    return run


def start(store: Path, run: Path, init: Path, **changes: Any) -> dict[str, Any]:
    return config(store, run, train__init=str(init), **{"optim__lr": 1e-9, "optim__table_lr": 0.0, "train__max_steps": 2, **changes})


@pytest.mark.parametrize("what", ["the run", "a checkpoint"])
def test_the_weights_are_those_of_the_run_and_the_optimizers_are_fresh(store: Path, first: Path, tmp_path: Path, what: str) -> None:
    """On another number of ranks, in other shards, with other optimizers."""
    init = first if what == "the run" else next((first / "checkpoints").glob("step-*"))
    keys = {"tables__sharding": "column_wise", "tables__optimizer": "adagrad", "train__save_every": 1}
    train(start(store, tmp_path / "run", init, **keys))
    before, after = read_tensors(first / "checkpoints" / "best"), read_tensors(tmp_path / "run" / "checkpoints" / "step-1")
    for name, value in before.items():
        if name.startswith("model."):
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-7)
    assert {float(value) for name, value in after.items() if name.endswith(".step")} == {1.0}
    assert (tmp_path / "run" / "config.yaml").read_text().count(str(init)) == 1


def test_a_refit_starts_from_the_same_weights(store: Path, first: Path, tmp_path: Path) -> None:
    train(start(store, tmp_path / "run", first, train__refit=True))
    before, after = read_tensors(first / "checkpoints" / "best"), read_tensors(tmp_path / "run" / "checkpoints" / "refit")
    torch.testing.assert_close(after["model.tables.item.weight"], before["model.tables.item.weight"], rtol=0, atol=1e-6)


def test_parameters_that_do_not_fit_are_all_named_on_all_ranks_before_anything_changes(store: Path, first: Path, tmp_path: Path) -> None:
    def attempt() -> str:
        with pytest.raises(ValueError, match="The checkpoint does not fit the config") as caught:
            train(start(store, tmp_path / "run", first, model__dim=16, encoder__num_layers=2))
        return str(caught.value)

    for text in run_ranks(attempt, 2, timeout_s=60):
        assert " tables.item.weight: saved [60, 8], wanted [60, 16]" in text
        assert "blocks.1.up.weight: saved nothing, wanted [16, 16]" in text
    assert not (tmp_path / "run").exists()


def test_a_resume_whose_parameters_do_not_fit_is_refused_with_the_same_list(store: Path, first: Path, tmp_path: Path) -> None:
    """Settings say so first where they are there; here somebody has copied the checkpoints of another run."""
    run = tmp_path / "run"
    train(config(store, run, train__max_steps=2, model__dim=16))
    tensors, path = next((first / "checkpoints").glob("step-*")), next((run / "checkpoints").glob("step-*"))
    state = read_manifest(path).state
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tensors, run / "checkpoints" / path.name)
    write_manifest(run / "checkpoints" / path.name, Manifest(read_manifest(tensors).files, state))
    before = sorted((file, file.read_bytes()) for file in run.rglob("*") if file.is_file() and file.name != "run.lock")
    with pytest.raises(ValueError, match=r"(?s)The checkpoint does not fit.* tables.item.weight: saved \[60, 8\], wanted \[60, 16\]"):
        train(config(store, run, train__max_steps=4, model__dim=16, train__resume=True))
    assert sorted((file, file.read_bytes()) for file in run.rglob("*") if file.is_file() and file.name != "run.lock") == before


def test_another_store_s_vocabulary_is_refused(tmp_path: Path) -> None:
    """Rows of the same number would be other items."""
    train(sections(ring(tmp_path / "store"), tmp_path / "first", num_epochs=1, refit=False))
    keys = {"num_epochs": 1, "refit": False, "init": str(tmp_path / "first")}
    other = ring(tmp_path / "other", words=[f"film-{i:02}" for i in range(19)] + ["film-99"])
    with pytest.raises(ValueError, match=r"(?s)tables are not those of the run.*vocabulary with hash.*leave out --train.init"):
        train(sections(other, tmp_path / "run", **keys))
    assert not (tmp_path / "run").exists()
    train(sections(ring(tmp_path / "newer", seed=7), tmp_path / "run", **keys))


def test_what_is_no_run_to_start_from_is_refused(store: Path, first: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    for init, message in (
        (tmp_path / "nowhere", "No run to start from"),
        (store, "No whole checkpoint"),
        (empty, "The run has no checkpoint to start from"),
        (tmp_path / "run", "A run cannot start from itself"),
        (tmp_path / "run" / "checkpoints" / "best", "A run cannot start from itself"),
    ):
        with pytest.raises(ValueError, match=message):
            train(start(store, tmp_path / "run", init))
    assert not (tmp_path / "run").exists()


def test_a_damaged_one_is_refused(store: Path, first: Path, tmp_path: Path) -> None:
    run = shutil.copytree(first, tmp_path / "first")
    file = run / "checkpoints" / "best" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"(?s)A checkpoint is damaged.*__1_0.distcp is not as it was saved"):
        train(start(store, tmp_path / "run", run))


def test_a_run_that_dies_before_its_first_save_starts_from_there_again_by_itself(store: Path, first: Path, tmp_path: Path) -> None:
    """One automatic restart of torchrun, which is told nothing; the losses are those of a run that did not die."""
    keys = {"optim__lr": 0.01, "optim__table_lr": 0.05, "train__max_steps": 0, "train__num_epochs": 2, "batching__prefetch": 0}
    run_ranks(lambda: train(start(store, tmp_path / "whole", first, **keys)), 2)
    run = tmp_path / "run"
    reaches, killed = Reaches(run, 3), []

    def kill_one() -> bool:
        if not killed and reaches():
            agent = next(pid for pid in children_of(os.getpid()) if len(children_of(pid)) == 2)
            os.kill(children_of(agent)[1], signal.SIGKILL)
            killed.append(agent)
        return False

    assert not launch_torchrun(start(store, run, first, **keys), 2, kill_one, 0, "kill", "--max-restarts=1")
    assert killed
    assert losses_of(run) == losses_of(tmp_path / "whole")
    assert not faults_of(run, NUM_SAMPLES, 2)
    assert [line["kind"] for line in read_lines(run / "metrics.jsonl")].count("test") == 1
    assert np.isfinite(losses_of(run)[-1][1])
