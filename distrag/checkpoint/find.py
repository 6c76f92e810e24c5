"""Which checkpoint is whole: looked for by the first rank, read through by all, and decided for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distrag.checkpoint.folders import PHASES, Place, former, list_cut, list_places, place_of
from distrag.checkpoint.manifest import MANIFEST, Damage, Manifest, check_hashes, check_sizes, read_manifest
from distrag.checkpoint.turns import take_turns
from distrag.problem import problem
from distrag.world import World

FORMER_LAYOUT = "state.json"
KEPT = ("best", "refit")


@dataclass(frozen=True)
class Found:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        skipped: newer ones that are not whole, and what is wrong with each.
    """

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()

    @property
    def state(self) -> Mapping[str, Any]:
        """The run's values in it."""
        return self.manifest.state


def find_newest(folder: Path, world: World) -> Found | None:
    """Returns the newest whole checkpoint of a run; None where none was ever whole. A collective: every rank calls it.

    A kept one (`best`, `refit`) counts as well: it is as good to go on from.

    Args:
        folder: `checkpoints` of the run.
        world: the ranks.

    Raises:
        ValueError: there are checkpoints, and none is whole; or one of the layout before this one. The same on every rank.
    """
    skipped: list[str] = []

    def look() -> tuple[list[Path], list[tuple[Place, str]]]:
        _check_layout(folder)
        cut = [(place_of(path.name.split(".part-")[0]), f"{path.name}: its save was cut") for path in list_cut(folder)]
        return _list_all(folder), [(place, told) for place, told in cut if place is not None]

    paths, cut = world.broadcast_object(world.on_first(look))
    for path in paths:
        manifest, damage = _verify(path, world)
        if manifest is not None and not damage:
            at = _place(manifest.state)
            return Found(path, manifest, tuple([told for place, told in sorted(cut, reverse=True) if place > at] + skipped))
        skipped.append(f"{path.name}: {damage}")
    if skipped:
        got, todo = "; ".join(skipped), "put the files back as they were, or start anew with another --train.run_dir"
        raise problem("No checkpoint of the run is whole", got=got, wanted="all files as they were saved", where=folder, todo=todo)
    if cut:
        world.on_first(lambda: print("\n".join(f"skipped {told}" for _, told in cut), flush=True))
    return None


def _list_all(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, the newest first; the kept ones after those of their step."""
    found = [(place, 0, path) for place, paths in list_places(folder).items() for path in paths]
    for name in KEPT:
        for path in (folder / name, former(folder / name)):
            if (path / MANIFEST).exists():
                try:
                    found.append((_place(read_manifest(path).state), -1, path))
                except Damage:
                    found.append(((0, -1), -1, path))
    return [path for _, _, path in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def _place(state: Mapping[str, Any]) -> Place:
    phase, step = state.get("phase"), state.get("step")
    return (PHASES.index(phase) if phase in PHASES else 0, step if type(step) is int else -1)


def _check_layout(folder: Path) -> None:
    old = [path for path in (folder / "last", folder / "last.old", folder / "best") if (path / FORMER_LAYOUT).exists()]
    if old and not list_places(folder):
        raise _former_layout(old[0])


def _former_layout(path: Path) -> ValueError:
    todo = "go on with the version of distrag that wrote it, or start anew with another --train.run_dir"
    got = f"{FORMER_LAYOUT} and no {MANIFEST}: format 1, whose files name code to run"
    return problem("A checkpoint of a former layout", got=got, wanted=MANIFEST, where=path, todo=todo)


def find_checkpoint(path: Path, world: World) -> Found:
    """Returns the checkpoint of that name when it is whole; the former one if a save was cut between its two renames.

    A collective: every rank calls it.

    Raises:
        ValueError: there is none, or it is damaged; the same on every rank.
    """

    def look() -> list[Path]:
        if (path / FORMER_LAYOUT).exists() and not (path / MANIFEST).exists():
            raise _former_layout(path)
        return [candidate for candidate in (path, former(path)) if (candidate / MANIFEST).exists()]

    damages: list[str] = []
    for candidate in world.broadcast_object(world.on_first(look)):
        manifest, damage = _verify(candidate, world)
        if manifest is not None and not damage:
            return Found(candidate, manifest)
        damages.append(f"{candidate.name}: {damage}")
    if damages:
        todo = "put the files back as they were, or take another checkpoint of the run"
        raise problem("A checkpoint is damaged", got="; ".join(damages), wanted="all files as they were saved", where=path, todo=todo)
    todo = "train the run to its first evaluation, or mend the path"
    raise problem("No whole checkpoint", got=f"no {MANIFEST}", wanted="a folder that a run saved", where=path, todo=todo)


def _verify(path: Path, world: World) -> tuple[Manifest | None, str]:
    """Returns the manifest of a checkpoint, and what is wrong with it; each rank reads its share of the files."""

    def look() -> tuple[Manifest | None, str]:
        try:
            manifest = read_manifest(path)
            return manifest, check_sizes(path, manifest)
        except Damage as damage:
            return None, str(damage)

    manifest, damage = world.broadcast_object(world.on_first(look))
    if manifest is None or damage:
        return manifest, damage
    wrong: list[str] = []
    take_turns(world, check_hashes(path, manifest, _my_files(manifest, world), wrong))
    return manifest, "; ".join(told for rank in world.all_gather_object(wrong) for told in rank)


def _my_files(manifest: Manifest, world: World) -> Sequence[str]:
    """Returns the files that this rank reads through, about as many bytes as every other."""
    load, mine = [0] * world.size, []
    for name, mark in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        rank = load.index(min(load))
        load[rank] += mark.bytes
        if rank == world.rank:
            mine.append(name)
    return mine


def read_extra(path: Path) -> dict[str, Any]:
    """Returns the run's values in a checkpoint, by a look at its manifest alone.

    Raises:
        ValueError: there is no checkpoint of that name, or its manifest is damaged.
    """
    for candidate in (path, former(path)):
        if (candidate / MANIFEST).exists():
            try:
                return dict(read_manifest(candidate).state)
            except Damage as damage:
                todo = "take another checkpoint of the run"
                raise problem("A checkpoint is damaged", got=damage, wanted="as it was saved", where=candidate, todo=todo) from None
    raise problem("No whole checkpoint", got=f"no {MANIFEST}", wanted="a folder that a run saved", where=path, todo="mend the path")


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest step's checkpoint that has a manifest, by names alone; None where there is none.

    Args:
        folder: `checkpoints` of a run.
    """
    return next((path for paths in list_places(folder).values() for path in paths if (path / MANIFEST).exists()), None)
