"""A resume of what is damaged is refused in five parts before anything on disk changes, and a former whole checkpoint is taken instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distrag.training.loop import train
from tests.training.runs import config, read_lines, write_histories


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(config(store, run, train__save_every=4))
    return run


def content(run: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path.relative_to(run)), path.read_bytes()) for path in run.rglob("*") if path.is_file() and path.name != "run.lock")


def halve(run: Path, name: str) -> None:
    path = run / "checkpoints" / "last" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(**values: Any) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        path = run / "checkpoints" / "last" / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return act


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: halve(run, "__0_0.distcp"),
        lambda run: halve(run, ".metadata"),
        lambda run: halve(run, "state.json"),
        lambda run: halve(run, "files.json"),
        lambda run: (run / "checkpoints" / "last" / "__0_0.distcp").unlink(),
        lambda run: (run / "checkpoints" / "last" / ".metadata").write_bytes(b""),
        write("checkpoints/last/state.json", "[]"),
        write("checkpoints/last/state.json", "null"),
        write("result.json", '{"test": '),
        write("result.json", "[]"),
        change(step="x"),
        change(step=-5),
        change(sampler={}),
        change(sampler=3),
        change(losses=None),
        change(phase=None),
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


def test_a_damaged_checkpoint_gives_way_to_the_former_whole_one(store: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "last", run / "checkpoints" / "last.old")
    halve(run, "__0_0.distcp")
    assert train(config(store, run, train__resume=True, train__num_epochs=3)).num_epochs == 3
