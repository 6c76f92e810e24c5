"""A resume of what is damaged goes on from a former whole checkpoint and says so, or is refused before anything on disk changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distrag.checkpoint.find import Found, find_newest
from distrag.checkpoint.manifest import Manifest, read_manifest, write_manifest
from distrag.training.loop import train
from distrag.world import World
from tests.ranks import run_ranks
from tests.training.runs import config, faults_of, losses_of, read_lines, write_histories

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("store") / "store", NUM_SAMPLES)


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 16 and 18, its last."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(config(store, run, train__save_every=4))
    return run


def newest(run: Path) -> Found:
    found = find_newest(run / "checkpoints", World(0, 1, 0, 1, torch.device("cpu")))
    assert found is not None
    return found


def content(run: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path.relative_to(run)), path.read_bytes()) for path in run.rglob("*") if path.is_file() and path.name != "run.lock")


def newest_only(run: Path) -> Path:
    """Removes all other checkpoints; returns the folder of the newest."""
    path = newest(run).path
    for other in (run / "checkpoints").iterdir():
        if other != path:
            shutil.rmtree(other)
    return path


def halve(name: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        path = newest_only(run) / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return act


def change(**values: Any) -> Callable[[Path], None]:
    """Changes the state of the newest checkpoint on purpose, its hashes made right again."""

    def act(run: Path) -> None:
        path = newest(run).path
        manifest = read_manifest(path)
        write_manifest(path, Manifest(manifest.files, {**manifest.state, **values}))

    return act


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "damage",
    [
        halve("__0_0.distcp"),
        halve(".metadata"),
        halve("manifest.json"),
        halve("schema.yaml"),
        lambda run: (newest_only(run) / "__0_0.distcp").unlink(),
        lambda run: (newest_only(run) / ".metadata").write_bytes(b""),
        write("result.json", '{"test": '),
        write("result.json", "[]"),
        change(step="x"),
        change(step=-5),
        change(sampler={}),
        change(sampler=3),
        change(lines=None),
        change(tables=[1]),
        change(phase=None),
        change(format=1),
        change(format=3),
    ],
)
def test_damage_is_refused_and_nothing_is_lost(store: Path, finished: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    damage(run)
    before = content(run)
    with pytest.raises(ValueError, match="got:") as caught:
        train(config(store, run, train__resume=True, train__num_epochs=3))
    assert all(part in str(caught.value) for part in ("got:", "wanted:", "where:", "to do:"))
    assert content(run) == before


def test_lines_that_are_none_of_ours_are_dropped_at_a_resume(store: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"a": 1}\n[]\n3\n"x"\n{"kind": "train", "st')
    result = train(config(store, run, train__resume=True, train__num_epochs=3))
    assert result.num_epochs == 3
    assert all(isinstance(line, dict) and "kind" in line for line in read_lines(run / "metrics.jsonl"))


def test_a_damaged_checkpoint_gives_way_to_the_former_whole_one_and_all_ranks_say_the_same(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Complete at step 16, cut or damaged at 18 and 40: as if the later ones had never been, and they go with the next save."""
    keys = {"train__save_every": 4, "train__num_epochs": 3}
    run_ranks(lambda: train(config(store, tmp_path / "whole", **keys)), 2)
    run, path = tmp_path / "run", tmp_path / "run" / "checkpoints"
    run_ranks(lambda: train(config(store, run, train__save_every=4, train__num_epochs=2, optim__schedule="cosine")), 2)
    shutil.copytree(path / "step-18", path / "step-40.part-1-1")
    (path / "step-40.part-1-1" / "manifest.json").unlink()
    shutil.copytree(path / "step-18", path / "step-41")
    (path / "step-41" / "__1_0.distcp").unlink()
    for name in ("step-18", "best"):
        copy = (path / name / "__0_0.distcp").read_bytes()
        (path / name / "__0_0.distcp").unlink()
        (path / name / "__0_0.distcp").write_bytes(bytes([copy[0] ^ 1]) + copy[1:])
    capfd.readouterr()
    run_ranks(lambda: train(config(store, run, train__resume=True, **keys)), 2)
    said = capfd.readouterr().out
    for told in (
        "skipped step-40.part-1-1: its save was cut",
        "skipped step-41: __1_0.distcp is gone",
        "skipped step-18: __0_0.distcp is not as it was saved",
        "goes on from step-16",
        "resumed (train) after step 16",
    ):
        assert told in said
    assert not faults_of(run, NUM_SAMPLES, 3)
    assert [step for step, _ in losses_of(run)] == [step for step, _ in losses_of(tmp_path / "whole")]
    assert {name.name for name in path.iterdir()} == {"best", "step-24", "step-27"}


def test_a_best_that_is_damaged_is_chosen_anew(store: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    state = newest(run).state
    best = run / "checkpoints" / "best"
    assert read_manifest(best).state["step"] == state["best_step"]
    if state["best_step"] == state["step"]:
        pytest.skip("the newest is the best, and is kept again")
    (best / ".metadata").write_bytes(b"")
    result = train(config(store, run, train__resume=True, train__num_epochs=3))
    assert "the next evaluation chooses anew" in capfd.readouterr().out
    assert result.best_step > state["step"]
    assert read_manifest(best).state["step"] == result.best_step


def test_emptied_metrics_and_samples_are_mentioned(store: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    (run / "samples" / "rank-0.jsonl").write_text("")
    result = train(config(store, run, train__resume=True, train__num_epochs=3))
    said = capfd.readouterr().out
    assert "metrics.jsonl holds 0 of the 18 train lines" in said
    assert "samples holds 0 of the 18 samples lines" in said
    assert len(result.losses) == 9
    assert result.num_epochs == 3


def test_the_state_of_a_checkpoint_does_not_grow_with_the_losses(store: Path, tmp_path: Path) -> None:
    sizes = []
    for epochs in (1, 4):
        run = tmp_path / str(epochs)
        train(config(store, run, train__num_epochs=epochs))
        sizes.append(len(json.dumps(newest(run).state)))
    assert sizes[1] < 1.05 * sizes[0]


def test_a_run_of_the_former_layout_is_refused_with_a_word(store: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    for name in ("last", "best"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "state.json").write_text('{"format": 1}')
    before = content(run)
    with pytest.raises(ValueError, match=r"(?s)A checkpoint of a former layout.*start anew"):
        train(config(store, run, train__resume=True))
    assert content(run) == before
