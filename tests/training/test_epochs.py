"""Epochs at the command line: every sample once on any number of ranks, another order each epoch, the same again after a cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distrag.cli import main
from distrag.config import read_config
from distrag.data.write import write_store
from distrag.training.build import build_job, build_sampler
from distrag.training.fit import Fit
from distrag.training.metrics import MetricsWriter, SampleLog
from distrag.world import start_world
from tests.ranks import run_ranks
from tests.training.runs import config, samples_of


def write_config(folder: Path, lengths: list[int], **changes: Any) -> Path:
    """Writes a store of histories of these lengths and a config of it that trains in folder/run; returns the config's path."""
    if not (folder / "store").exists():
        items = np.arange(sum(lengths)) % 7
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        write_store(folder / "store", history={"item": items}, offsets=offsets, label=np.arange(len(lengths)) % 2)
    sections = config(folder / "store", folder / "run", **changes)
    sections["data"] |= {"split": {"kind": "row", "valid_share": 0.0, "test_share": 0.0}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def call(folder: Path, world_size: int, *words: str) -> None:
    run_ranks(lambda: main(["train", "--config", str(folder / "config.yaml"), *words]), world_size)


def test_two_epochs_on_two_ranks_have_two_orders_of_the_same_samples_and_the_same_again_on_a_rerun(tmp_path: Path) -> None:
    write_config(tmp_path, [4, 4, 4, 4, 4, 4], batching__global_tokens=8, data__max_len=8, train__num_epochs=4)
    call(tmp_path, 2)
    first = samples_of(tmp_path / "run")
    for epoch in range(4):
        assert sorted(sample for step in first[epoch] for sample in step) == [0, 1, 2, 3, 4, 5]
    assert len({json.dumps(first[epoch]) for epoch in range(4)}) > 1
    call(tmp_path, 2)
    assert samples_of(tmp_path / "run") == first
    assert (tmp_path / "run.1").exists()


def test_a_rank_whose_epoch_was_set_off_by_one_trains_the_epoch_of_the_others(tmp_path: Path) -> None:
    path = write_config(tmp_path, [4, 4, 4, 4, 4, 4], batching__global_tokens=8, data__max_len=8)

    def go() -> None:
        job = build_job(read_config(["--config", str(path)]), start_world("cpu"))
        sampler = build_sampler(job)
        writer = MetricsWriter(tmp_path, active=False, tensorboard=False)
        log = SampleLog(tmp_path / "run", job.world.rank)
        fit = Fit(job, sampler, writer, tmp_path / "run", samples=log)
        sampler.set_epoch(job.world.rank)
        fit.run()

    run_ranks(go, 2)
    for epoch, steps in samples_of(tmp_path / "run").items():
        assert sorted(sample for step in steps for sample in step) == [0, 1, 2, 3, 4, 5], epoch


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_30_to_99_after_two_resumes_in_one_epoch_are_those_of_a_run_that_was_not_cut(tmp_path: Path, world_size: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(2).integers(2, 9, 400)]
    keys = {"batching__global_tokens": 16, "batching__prefetch": 4, "data__max_len": 16, "train__num_epochs": 1, "encoder__dropout": 0.0}
    (tmp_path / "whole").mkdir()
    write_config(tmp_path / "whole", lengths, **keys)
    call(tmp_path / "whole", world_size)
    whole = samples_of(tmp_path / "whole" / "run")[0]
    assert len(whole) >= 100
    write_config(tmp_path, lengths, **keys)
    call(tmp_path, world_size, "--train.max_steps=30")
    call(tmp_path, world_size, "--train.max_steps=40", "--resume")
    call(tmp_path, world_size, "--train.resume=true")
    assert samples_of(tmp_path / "run")[0] == whole


def test_two_samples_on_four_ranks_train_with_ranks_of_weight_zero(tmp_path: Path) -> None:
    write_config(tmp_path, [5, 3])
    call(tmp_path, 4)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["num_steps"] == 2
    assert [sorted(sample for step in steps for sample in step) for steps in samples_of(tmp_path / "run").values()] == [[0, 1]] * 2
    assert np.isfinite(result["losses"]).all()


def test_no_sample_at_all_is_an_error_of_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, [5, 3])
    sections = yaml.safe_load(path.read_text())
    sections["data"]["split"] = {"kind": "row", "valid_share": 0.5, "test_share": 0.5}
    path.write_text(yaml.safe_dump(sections))

    def attempt() -> int:
        with pytest.raises(SystemExit) as left:
            main(["train", "--config", str(path)])
        return int(str(left.value.code))

    assert run_ranks(attempt, 4) == [2] * 4
    assert "No sample to train on" in capfd.readouterr().err
