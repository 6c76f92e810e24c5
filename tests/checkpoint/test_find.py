"""The newest whole checkpoint is found whatever happened to the others, and what is wrong with those is said."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from distrag.checkpoint import Checkpoints, find_checkpoint, find_newest, has_checkpoint, load_checkpoint, newest_checkpoint, read_extra
from distrag.checkpoint.tensors import _Unpickler
from distrag.world import World
from tests.checkpoint.jobs import build, fill, loaded, slow_down
from tests.ranks import run_ranks
from tests.training.runs import write_histories

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "config.yaml", "manifest.json")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("find") / "store", 20)


@pytest.fixture(scope="module")
def saved(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks: steps 1, 2 and 3, the best of step 3."""
    run = tmp_path_factory.mktemp("saved")
    (run / "config.yaml").write_text("task: next_item\n" * 20)

    def go() -> None:
        job, optimizer = build(store, run)
        checkpoints = Checkpoints(run / "checkpoints", job.world, keep=3, contract=[run / "config.yaml"])
        for step in (1, 2, 3):
            fill(job, optimizer, float(step))
            checkpoints.save(f"step-{step}", job.parallel, optimizer, {"phase": "train", "step": step}, kept="best" if step == 3 else "")

    run_ranks(go, 2)
    return run / "checkpoints"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    return tmp_path / "checkpoints"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_found(folder: Path, name: str) -> None:
    path = folder / "step-3" / name
    whole = path.read_bytes()
    bits = np.random.default_rng(1).integers(0, 8 * len(whole), 40 if name == "manifest.json" else 8).tolist()
    for bit in [0, 8 * len(whole) - 1, *bits]:
        flip(path, bit)
        found = find_newest(folder, ALONE)
        assert found is not None
        if found.path.name == "step-3":  # a letter of a number's exponent, say: it still reads the same
            assert name == "manifest.json"
            path.write_bytes(whole)
            assert found == find_newest(folder, ALONE)
            continue
        assert found.path.name == "step-2"
        assert found.skipped[0].startswith(f"step-3: {name} ")
        path.write_bytes(whole)
    assert find_newest(folder, ALONE).path.name == "step-3"  # type: ignore[union-attr]


def cut(to: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: to(path.stat().st_size)])  # type: ignore[return-value]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        cut(lambda size: size - 1),
        cut(lambda size: size // 2),
        cut(lambda size: 0),
        Path.unlink,
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.write_bytes(path.read_bytes() + b" x"),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
    ],
)
def test_a_file_that_was_cut_or_removed_or_replaced_is_found(folder: Path, name: str, damage: Callable[[Path], Any]) -> None:
    damage(folder / "step-3" / name)
    found = find_newest(folder, ALONE)
    assert found is not None
    assert (found.path.name, found.state["step"]) == ("step-2", 2)
    assert len(found.skipped) == 1
    assert f"step-3: {name} " in found.skipped[0]
    with pytest.raises(ValueError, match=r"(?s)damaged|No whole checkpoint"):
        find_checkpoint(folder / "step-3", ALONE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        {"files": []},
        {"files": {"__0_0.distcp": 3}},
        {"files": {"__0_0.distcp": {"bytes": "1", "sha256": ""}}},
        {"files": {"../../secret": {"bytes": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": {"..": {"bytes": 1, "sha256": ""}}},
        {"state": 3},
        {"state": None},
        {"format": 1},
        {"format": 99},
    ],
)
def test_a_manifest_that_says_something_else_is_no_manifest(folder: Path, body: Any) -> None:
    """Even with a right hash of its own."""
    path = folder / "step-3" / "manifest.json"
    if isinstance(body, dict):
        whole = json.loads(path.read_text()) | body
        del whole["sha256"]
        body = json.dumps({**whole, "sha256": hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()}).encode()
    path.write_bytes(body)
    found = find_newest(folder, ALONE)
    assert found is not None
    assert found.path.name == "step-2"
    assert "step-3: manifest.json " in found.skipped[0]


def test_a_save_that_was_cut_is_reported_and_not_counted(folder: Path) -> None:
    half = folder / "step-40.part-17-1"
    shutil.copytree(folder / "step-3", half)
    (half / "__1_0.distcp").unlink()
    (half / "manifest.json").unlink()
    found = find_newest(folder, ALONE)
    assert found is not None
    assert found.path.name == "step-3"
    assert found.skipped == ("step-40.part-17-1: its save was cut",)


def test_the_newest_is_by_number_and_a_refit_comes_after_all_steps(folder: Path) -> None:
    for name in ("step-10", "step-9", "refit-step-2"):
        shutil.copytree(folder / "step-3", folder / name)
    assert find_newest(folder, ALONE).path.name == "refit-step-2"  # type: ignore[union-attr]
    shutil.rmtree(folder / "refit-step-2")
    assert find_newest(folder, ALONE).path.name == "step-10"  # type: ignore[union-attr]
    assert newest_checkpoint(folder) == folder / "step-10"


def test_the_best_is_gone_on_from_where_it_is_the_newest_whole_one(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    assert find_newest(folder, ALONE).path.name == "step-3"  # type: ignore[union-attr]
    flip(folder / "step-3" / "__0_0.distcp", 1000)
    assert find_newest(folder, ALONE).path.name == "best"  # type: ignore[union-attr]
    (folder / "best").rename(folder / "best.old")
    assert find_newest(folder, ALONE).path.name == "best.old"  # type: ignore[union-attr]
    (folder / "best.old" / "manifest.json").write_text("{")
    assert find_newest(folder, ALONE).path.name == "step-2"  # type: ignore[union-attr]


def test_a_former_one_of_the_same_step_is_taken_where_the_newer_is_not_whole(folder: Path) -> None:
    shutil.copytree(folder / "step-3", folder / "step-3.old")
    (folder / "step-3" / ".metadata").unlink()
    found = find_newest(folder, ALONE)
    assert found is not None
    assert found.path.name == "step-3.old"
    shutil.rmtree(folder / "step-3")
    assert find_checkpoint(folder / "step-3", ALONE).path.name == "step-3.old"
    assert has_checkpoint(folder / "step-3")


def test_where_none_is_whole_all_are_named_and_the_run_does_not_start_anew(folder: Path) -> None:
    for step in (1, 2, 3):
        (folder / f"step-{step}" / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"(?s)No checkpoint of the run is whole.*step-3: __1_0.distcp is gone; step-2.*step-1"):
        find_newest(folder, ALONE)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "checkpoints", ALONE) is None
    assert not has_checkpoint(tmp_path / "last")
    with pytest.raises(ValueError, match="No whole checkpoint"):
        read_extra(tmp_path / "last")
    with pytest.raises(ValueError, match="No whole checkpoint"):
        find_checkpoint(tmp_path / "last", ALONE)


def test_the_layout_of_former_versions_is_refused_with_a_word(tmp_path: Path) -> None:
    for name in ("last", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="A checkpoint of a former layout"):
        find_newest(tmp_path / "checkpoints", ALONE)
    with pytest.raises(ValueError, match="A checkpoint of a former layout"):
        find_checkpoint(tmp_path / "checkpoints" / "best", ALONE)


def test_all_ranks_take_the_one_that_the_first_rank_found(saved: Path, tmp_path: Path) -> None:
    """Also where a rank's view of a shared disk lags behind: here the second sees a folder without the newest step."""
    views = [tmp_path / f"view{rank}" for rank in range(2)]
    for view in views:
        shutil.copytree(saved, view / "checkpoints")
    shutil.rmtree(views[1] / "checkpoints" / "step-1")

    def go() -> tuple[str, float]:
        rank = int(os.environ["RANK"])
        world = World(rank, 2, rank, 2, torch.device("cpu"))
        if rank == 0:
            slow_down("step-3", 0.2)
        found = find_newest(views[0] / "checkpoints" if rank == 0 else views[1] / "elsewhere", world)
        assert found is not None
        return found.path.name, found.state["step"]

    assert run_ranks(go, 2, timeout_s=60) == [("step-3", 3)] * 2


class _Runs:
    """Stands for code that a pickle from elsewhere would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def sign(folder: Path) -> None:
    """Makes the manifest right again, as anybody can who changes a file on purpose."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    for name, mark in body["files"].items():
        content = (folder / name).read_bytes()
        mark |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps({**body, "sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}))


def change_metadata(change: Callable[[Any, Path], None]) -> Callable[[Path, Path], None]:
    def act(folder: Path, mark: Path) -> None:
        metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        change(metadata, mark)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return act


def point(metadata: Any, index: MetadataIndex, path: str, at: int = 0) -> None:
    metadata.storage_data[index] = _StorageInfo(path, at, 10)


def hide(metadata: Any, _mark: Path) -> None:
    metadata.state_dict_metadata[first(metadata)[0]] = BytesStorageMetadata()


def first(metadata: Any) -> tuple[str, MetadataIndex]:
    index = next(iter(metadata.storage_data))
    return index.fqn, index


ATTACKS: list[tuple[Callable[[Path, Path], Any], str]] = [
    (lambda folder, mark: (folder / ".metadata").write_bytes(pickle.dumps(_Runs(mark))), r"names (posix|os).mkdir"),
    (change_metadata(lambda metadata, mark: setattr(metadata, "planner_data", _Runs(mark))), r"names (posix|os).mkdir"),
    (change_metadata(lambda metadata, _: point(metadata, first(metadata)[1], "../../secret")), "leads out of the checkpoint"),
    (change_metadata(lambda metadata, _: point(metadata, first(metadata)[1], "__0_0.distcp", -5)), "has no place for"),
    (change_metadata(hide), "names .*BytesStorageMetadata"),
    (change_metadata(lambda metadata, _: metadata.state_dict_metadata[first(metadata)[0]].chunks.clear()), "does not have all of"),
    (change_metadata(lambda metadata, _: metadata.storage_data.clear()), "does not have all of"),
    (lambda folder, mark: (folder / ".metadata").write_bytes(pickle.dumps([1, 2])), "cannot be read"),
    (lambda folder, mark: (folder / ".metadata").write_bytes(b"no pickle"), "cannot be read"),
    (lambda folder, mark: torch.save(_Runs(mark), folder / "__0_0.distcp"), "cannot be read"),
    (lambda folder, mark: (folder / "__0_0.distcp").write_bytes(pickle.dumps(_Runs(mark)) * 1000), "cannot be read"),
]


def test_a_checkpoint_from_elsewhere_runs_no_code_and_reads_no_other_file(store: Path, folder: Path, tmp_path: Path) -> None:
    def go() -> None:
        job, optimizer = build(store, tmp_path / "run")
        for number, (attack, message) in enumerate(ATTACKS):
            found = shutil.copytree(folder / "step-3", tmp_path / str(number))
            attack(found, tmp_path / "mark")
            sign(found)
            with pytest.raises(ValueError, match=rf"(?s)A checkpoint cannot be read.*{message}"):
                load_checkpoint(found, job.parallel, optimizer, job.world)
            assert not (tmp_path / "mark").exists()

    run_ranks(go, 1)


def test_what_two_ranks_saved_is_read_by_one_and_by_three(store: Path, saved: Path, tmp_path: Path) -> None:
    def go() -> tuple[int, set[float]]:
        job, optimizer = build(store, tmp_path / "run")
        return loaded(job, optimizer, saved / "step-2")

    for size in (1, 3):
        assert run_ranks(go, size) == [(2, {2.0})] * size
