"""A run that torchrun or Slurm starts again goes on by itself, in its own folder, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrag.training.loop import train
from tests.training.deaths import die
from tests.training.runs import config, read_lines, write_histories
from tests.training.test_resume import same


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("restarts") / "store", 120)


def resumes_of(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "resume"]


def test_torchrun_restarts_a_run_whose_rank_was_killed_and_it_ends_as_if_nothing_had_been(store: Path, tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(store)
    seen = die(tmp_path / "cut", "forward", "kill", launcher="restarts", world_size=2, victim=1, turn=9)
    assert seen.codes == [0], seen.said
    assert set(seen.named) == {1}
    assert not die(tmp_path / "whole", "", "", launcher="processes", world_size=2, victim=0).codes[0]
    assert resumes_of(tmp_path / "cut" / "run") == [8]
    same(tmp_path / "cut" / "run", tmp_path / "whole" / "run")
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["config.yaml", "died", "run"]


def test_a_restart_before_the_first_save_begins_anew_in_the_same_folder(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").symlink_to(store)
    run, keys = tmp_path / "cut" / "run", {"train__save_every": 0, "train__eval_every": 0, "train__num_epochs": 1}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")  # this process is the agent
    assert die(tmp_path / "cut", "forward", "kill", launcher="processes", world_size=2, victim=0, **keys).codes == [-9, 1]
    assert die(tmp_path / "cut", "", "", launcher="processes", world_size=1, victim=0, **keys).codes == [0]
    assert [path.name for path in tmp_path.glob("cut/run*")] == ["run"]
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    again = die(tmp_path / "cut", "", "", launcher="processes", world_size=1, victim=0, **keys)
    assert "this run is finished" in again.said[0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert die(tmp_path / "cut", "", "", launcher="processes", world_size=1, victim=0, **keys).codes == [0]
    assert sorted(path.name for path in tmp_path.glob("cut/run*")) == ["run", "run.1"]


def test_a_requeued_slurm_job_goes_on_and_another_step_of_the_job_does_not(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    train(config(store, run, train__max_steps=4))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(config(store, run, train__max_steps=6))
    assert resumes_of(run) == [4]
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    train(config(store, run, train__max_steps=4))
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    train(config(store, run, train__max_steps=4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
