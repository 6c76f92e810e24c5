"""The checkpoints of a run: saved beside the training or in its way, one kept as best, the oldest removed."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distrag.checkpoint.board import Board, Stopped
from distrag.checkpoint.files import copy_whole, hash_now
from distrag.checkpoint.folders import keep_as, prune, swap
from distrag.checkpoint.manifest import Manifest, Mark, read_manifest, write_manifest
from distrag.checkpoint.pieces import Piece, read_model, read_random, read_states, share
from distrag.checkpoint.tensors import METADATA, write_metadata, write_pieces
from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.world import World

_TURN_S = 5.0
"""A rank that waits for a save tells the others as often that it lives; far below any `train.timeout_s`."""


_ROOM = 0.7
"""Share of a host's free memory that the copies of a save may take."""


@dataclasses.dataclass(frozen=True)
class _Save:
    """One save: everything that the thread which writes it needs."""

    path: Path
    part: Path
    pieces: list[Piece]
    state: dict[str, Any]
    kept: str


class Checkpoints:
    """Saves the checkpoints of a run; every rank has one, and all of its calls are collectives.

    A thread of each rank writes that rank's file; the first rank then joins them and gives the whole its name. These threads exchange
    nothing by collectives, so they may work while the ranks train.

    Args:
        folder: `checkpoints` of the run.
        world: the ranks.
        keep: how many of the newest steps stay; 0 removes none.
        background: whether training goes on while a save is written; its tensors are then copied to the host first, if they have room.
        contract: files that are copied into every checkpoint, where they exist.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 0, background: bool = False, contract: Sequence[Path] = ()) -> None:
        self.folder, self.world, self.keep, self.background, self.contract = folder, world, keep, background, contract
        self.newest: Path | None = None
        # A rank that outlives a killed run for a moment cannot write into the saves of the next.
        self._name = world.broadcast_object(f"{os.getpid()}-{time.time_ns()}")
        self._board = Board(world.rank, world.size, self._name)
        self._count = 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def save(self, name: str, parallel: Parallel, optimizer: Any | None, state: Mapping[str, Any], *, kept: str = "") -> None:
        """Saves a checkpoint; the former ones stay usable until it is whole, whenever a process is killed.

        Args:
            name: of its folder.
            parallel: the sharded model.
            optimizer: its CombinedOptimizer, or None to save weights only.
            state: small JSON-able values.
            kept: another name to keep it under once it is whole.

        Raises:
            ValueError: the save before this one failed, or this one where it is not written in the background; the same on every rank.
        """
        self.wait()
        states = read_states(parallel, optimizer) if optimizer is not None else ()
        pieces = share(iter([*read_model(parallel), *states, *read_random(self.world)]), self.world)
        if self.background and not self._copies:
            self.background = self._has_room(pieces)
        if self.background:
            pieces = [dataclasses.replace(piece, tensor=self._copy(piece)) for piece in pieces]
        self._count += 1
        self._stop = threading.Event()
        self.newest = self.folder / name
        part = self.folder / f"{name}.part-{self._name}-{self._count}"
        save = _Save(self.newest, part, pieces, dict(state), kept)
        self._thread = threading.Thread(target=self._write, args=(save,), name=f"save {name}", daemon=True)
        self._thread.start()
        if not self.background:
            self.wait()

    def _has_room(self, pieces: list[Piece]) -> bool:
        """Returns whether every rank's host has memory for a copy of what it saves; says so where not."""
        size, room = sum(piece.tensor.nbytes for piece in pieces), self.world.free_host_bytes()
        fits = all(self.world.all_gather_object(size <= _ROOM * room))
        if not fits and self.world.rank == 0:
            print("saves are written in the way of training: a copy of what they hold would fill the memory of the host", flush=True)
        return fits

    def _copy(self, piece: Piece) -> torch.Tensor:
        """Returns the piece's values in memory of the host that every save uses again: fresh memory costs more than the copy."""
        key, tensor = (piece.name, piece.offsets), piece.tensor
        kept = self._copies.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return kept.copy_(tensor)

    def update(self, state: Mapping[str, Any], *, kept: str = "") -> None:
        """Replaces the values of the newest checkpoint, whole or not at all, and keeps it under another name where one is given.

        Raises:
            ValueError: its save failed, or a file cannot be written; the same on every rank.
        """
        self.wait()
        assert self.newest is not None, "nothing has been saved or loaded"
        newest = self.newest

        def change() -> None:
            write_manifest(newest, dataclasses.replace(read_manifest(newest), state=dict(state)))
            if kept:
                keep_as(newest, self.folder / kept)

        self.world.on_first(change)

    def keep_newest(self, kept: str) -> None:
        """Keeps the newest checkpoint under another name too.

        Raises:
            ValueError: its save failed, or a file cannot be written; the same on every rank.
        """
        self.wait()
        assert self.newest is not None, "nothing has been saved or loaded"
        newest = self.newest
        if newest != self.folder / kept:
            self.world.on_first(lambda: keep_as(newest, self.folder / kept))

    def wait(self) -> None:
        """Returns once the save under way, if any, is whole.

        Raises:
            ValueError: it failed on any rank; the same on every rank.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        alive, seconds = True, 0.1
        while alive:
            thread.join(seconds)
            seconds = min(2 * seconds, _TURN_S)
            told = self.world.all_gather_object((thread.is_alive(), self._error is not None))
            alive, failed = (any(column) for column in zip(*told, strict=True))
            if failed:
                self._stop.set()  # the first rank may wait for a note that never comes
        error, self._error = self._error, None
        self.world.agree(error)

    def abandon(self, seconds: float) -> None:
        """Gives the save under way so long to become whole, alone and without a word; for a run that ends in an error."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._stop.set()

    def _write(self, save: _Save) -> None:
        try:
            note = self._write_part(save)
            self._board.post(save.part.name, note)
            if self.world.rank == 0:
                self._publish(save, self._board.collect(save.part.name, self._stop))
        except Stopped:
            pass
        except Exception as error:
            self._error = self._error or _as_problem(error, save.part)

    def _write_part(self, save: _Save) -> dict[str, Any]:
        """Writes this rank's file; returns where what lies in it, or what went wrong."""
        try:
            save.part.mkdir(parents=True, exist_ok=True)
            written = write_pieces(save.part, self.world.rank, save.pieces)
            files = sorted({entry["file"] for entry in written})
            marks = {name: [(save.part / name).stat().st_size, hash_now(save.part / name)] for name in files}
        except Exception as error:
            self._error = _as_problem(error, save.part)
            return {"error": str(error)}
        return {"written": written, "marks": marks}

    def _publish(self, save: _Save, notes: list[dict[str, Any]]) -> None:
        """Makes a whole checkpoint of what all ranks wrote, and puts it in its place."""
        failed = [f"rank {rank}: {note['error']}" for rank, note in enumerate(notes) if "error" in note]
        if failed:
            raise OSError(0, "; ".join(failed), str(save.part))
        write_metadata(save.part, [note["written"] for note in notes])
        marks = {name: Mark(*mark) for note in notes for name, mark in note["marks"].items()}
        for file in self.contract:
            if file.is_file():
                copy_whole(file, save.part / file.name)
        for name in (METADATA, *(file.name for file in self.contract if file.is_file())):
            marks[name] = Mark((save.part / name).stat().st_size, hash_now(save.part / name))
        write_manifest(save.part, Manifest(marks, save.state))
        swap(save.part, save.path)
        if save.kept:
            keep_as(save.path, self.folder / save.kept)
        if self.keep:
            prune(self.folder, save.path, self.keep)


def _as_problem(error: Exception, where: Path) -> Exception:
    """Returns what a user can act on; torch tells of a full disk in words of its own."""
    if not isinstance(error, OSError | RuntimeError):
        return error
    got = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    where = getattr(error, "filename", None) or where
    todo = "free or unlock the folder, then resume the run: the checkpoint before this one is whole"
    return problem("A checkpoint cannot be written", got=got, wanted="a place to write to", where=where, todo=todo)


def save_checkpoint(path: Path, parallel: Parallel, optimizer: Any | None, extra: Mapping[str, Any], world: World) -> None:
    """Writes one checkpoint and waits for it; a former one of that name stays usable until it is whole. Every rank calls it.

    Args:
        path: folder of the checkpoint.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None to save weights only.
        extra: small JSON-able values (step, epoch, metric).
        world: the ranks.

    Raises:
        ValueError: a file cannot be written; the same on every rank.
    """
    Checkpoints(path.parent, world).save(path.name, parallel, optimizer, extra)
