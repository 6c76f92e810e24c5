"""The folders of a run's checkpoints: their names and order, one put in the place of another, old ones removed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from distrag.checkpoint.files import link_or_copy, sync_folder
from distrag.checkpoint.manifest import MANIFEST

PHASES = ("train", "refit")
_STEP = re.compile(r"(?:(refit)-)?step-(\d+)")
Place = tuple[int, int]
"""Where in a run a checkpoint was saved: number of the phase, step in it."""


def step_name(phase: str, step: int) -> str:
    """Returns the name of a step's checkpoint: `step-12`, or `refit-step-12`."""
    return f"step-{step}" if phase == "train" else f"{phase}-step-{step}"


def place_of(name: str) -> Place | None:
    """Returns where in the run a checkpoint of this name was saved; None for another kind of name."""
    found = _STEP.fullmatch(name)
    return (PHASES.index(found[1] or "train"), int(found[2])) if found else None


def list_places(folder: Path) -> dict[Place, list[Path]]:
    """Returns the folders of each step, newest step first; a former one of the same step comes second."""
    found: dict[Place, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        place = place_of(path.name.removesuffix(".old"))
        if place is not None and path.is_dir():
            found.setdefault(place, []).append(path)
    return dict(sorted(found.items(), reverse=True))


def list_cut(folder: Path) -> list[Path]:
    """Returns what cut saves left behind."""
    return sorted(path for path in folder.glob("*.part-*") if path.is_dir())


def former(path: Path) -> Path:
    """Returns where the checkpoint that had this name lies while a new one takes its place."""
    return path.with_name(path.name + ".old")


def exists(path: Path) -> bool:
    """Returns whether there is a checkpoint of this name, or the former one of a save that was cut between its two renames."""
    return any((candidate / MANIFEST).exists() for candidate in (path, former(path)))


def swap(part: Path, path: Path) -> None:
    """Puts a whole folder in the place of the former one of that name; one of the two is there whenever the process is killed."""
    old = former(path)
    if path.exists():  # else a save was cut between the two renames, and `.old` is the only whole one until the second
        remove(old)
        path.rename(old)
    part.rename(path)
    sync_folder(path.parent)
    remove(old)


def remove(folder: Path) -> None:
    """Removes a checkpoint; at no moment is half of it taken for a whole one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def keep_as(path: Path, name: Path) -> None:
    """Keeps a whole checkpoint under another name too, by links where the file system has them."""
    part = name.with_name(f"{name.name}.part-keep")
    remove(part)
    part.mkdir()
    for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):  # what makes it whole comes last
        link_or_copy(file, part / file.name)
    sync_folder(part)
    swap(part, name)


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes the checkpoints of all steps but the `keep` newest ones up to `newest`, and what cut saves left.

    Steps beyond `newest` are of a line that the run has left: it went on from before them because they were damaged.
    """
    last = place_of(newest.name)
    assert last is not None, newest
    kept = 0
    for place, paths in list_places(folder).items():
        whole = [path for path in paths if (path / MANIFEST).exists()]
        stays = place <= last and kept < keep and bool(whole)
        kept += stays
        for path in paths:
            if not stays or path != whole[0]:
                remove(path)
    for part in list_cut(folder):
        remove(part)
