"""A run that is cut goes on as if it had not been: same losses on the same ranks, every sample once on any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrag.checkpoint import find_checkpoint, read_extra
from distrag.config import read_config
from distrag.training.build import build_job
from distrag.training.loop import RunResult, run_job, train
from distrag.world import start_world
from tests.ranks import RankError, run_ranks
from tests.training.runs import config, cut, faults_of, losses_of, read_lines, reaches, samples_of, write_histories

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("resume") / "store", NUM_SAMPLES)


class Cut(Exception):
    """What stands for the end of a process."""


class _Cutting:
    """A collate in which the process ends: in the training step, or the evaluation, of a global step."""

    def __init__(self, whole: Any, epoch: int, step: int, *, training: bool) -> None:
        self.whole, self.at = whole, (epoch, step, training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if (named.get("epoch"), named.get("step"), named.get("training")) == self.at:
            raise Cut
        return self.whole(*given, **named)


def train_until(sections: dict[str, Any], epoch: int, step: int, *, training: bool = True) -> None:
    """Trains on this rank, and is cut before a step, or in an evaluation, without a chance to save."""
    job = build_job(read_config(sections), start_world("cpu"))
    with pytest.raises(Cut):
        run_job(dataclasses.replace(job, collate=_Cutting(job.collate, epoch, step, training=training)))


def same(found: Path, wanted: Path) -> None:
    """Checks that two runs logged the same: losses bit for bit, evaluations, samples of every step."""
    assert losses_of(found) == losses_of(wanted)
    assert losses_of(found, "refit") == losses_of(wanted, "refit")
    held_out = [[line for line in read_lines(run / "metrics.jsonl") if line["kind"] in ("valid", "test")] for run in (found, wanted)]
    assert held_out[0] == held_out[1]
    assert samples_of(found) == samples_of(wanted)
    results = [json.loads((run / "result.json").read_text()) for run in (found, wanted)]
    for result in results:
        del result["seconds"], result["run_dir"]
    assert results[0] == results[1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_three_resumes_in_one_epoch_and_one_at_its_end_repeat_nothing(store: Path, tmp_path: Path, world_size: int) -> None:
    run_ranks(lambda: train(config(store, tmp_path / "whole", train__save_every=2)), world_size)

    def go(*at: int, **more: Any) -> None:
        run_ranks(lambda: train_until(config(store, tmp_path / "cut", train__save_every=2, **more), *at), world_size)

    last = len(samples_of(tmp_path / "whole")[0])
    go(0, 3)
    go(0, 4, train__resume=True)
    go(0, 7, train__resume=True)
    go(1, 0, train__resume=True)
    assert read_extra(tmp_path / "cut" / "checkpoints" / "last")["step"] == last
    go(1, 2, train__resume=True)
    run_ranks(lambda: train(config(store, tmp_path / "cut", train__save_every=2, train__resume=True)), world_size)
    same(tmp_path / "cut", tmp_path / "whole")
    assert not faults_of(tmp_path / "cut", NUM_SAMPLES, 2)
    resumed = [line["step"] for line in read_lines(tmp_path / "cut" / "metrics.jsonl") if line["kind"] == "resume"]
    assert resumed == [2, 4, 6, last, last + 2]
