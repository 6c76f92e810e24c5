"""A checkpoint into a model and its optimizers, whatever ranks and sharding saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distrag.checkpoint.find import Found, find_checkpoint
from distrag.checkpoint.manifest import Damage
from distrag.checkpoint.match import Match, check_match, match
from distrag.checkpoint.pieces import Piece, begin_states, read_model, read_random, read_states, set_random
from distrag.checkpoint.tensors import read_metadata, read_pieces, sizes_of
from distrag.checkpoint.turns import take_turns
from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.world import World, agreed

_TODO = "take a config of these shapes, or another checkpoint"


def match_checkpoint(found: Found, parallel: Parallel, optimizer: Any | None, world: World, todo: str = _TODO) -> Match:
    """Returns how a checkpoint fits a model, before anything is loaded. A collective: every rank calls it.

    Args:
        found: the checkpoint.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None where only weights matter.
        world: the ranks.
        todo: what to do when it does not fit.

    Raises:
        ValueError: it does not fit, with the list of what differs; the same on every rank.
    """

    def look() -> Match:
        it = match(sizes_of(_read_metadata(found)), parallel, optimizer)
        check_match(it, found.path, todo)
        return it

    it: Match = world.broadcast_object(world.on_first(look))
    return it


def _read_metadata(found: Found) -> Any:
    try:
        return read_metadata(found.path, found.manifest.files)
    except Damage as damage:
        raise _unreadable(damage, found.path) from None


def _unreadable(damage: Damage, where: Path) -> ValueError:
    todo = "take another checkpoint of the run; do not load one whose origin you do not know"
    return problem("A checkpoint cannot be read", got=damage, wanted="tensors as they were saved", where=where, todo=todo)


def load_checkpoint(
    source: Path | Found, parallel: Parallel, optimizer: Any | None, world: World, *, generators: bool = False
) -> dict[str, Any]:
    """Fills the model (and optimizer) from a checkpoint of any world size and sharding; returns the run's values in it.

    Nothing changes unless all of it fits. A collective: every rank calls it.

    Args:
        source: folder of the checkpoint, or one that was found whole.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None to load weights only.
        world: the ranks.
        generators: put torch's generators back too; only for a checkpoint of as many ranks on the same kind of device.

    Raises:
        ValueError: there is no whole checkpoint, it does not fit, or it cannot be read; the same on every rank.
    """
    found = source if isinstance(source, Found) else find_checkpoint(source, world)
    fits = match_checkpoint(found, parallel, optimizer, world)
    metadata = agreed(world, lambda: _read_metadata(found))
    if optimizer is not None:
        begin_states(parallel, optimizer, fits.names)
    pieces = [*read_model(parallel), *(read_states(parallel, optimizer) if optimizer is not None else ())]
    random = list(read_random(world)) if generators else []
    take_turns(world, _fill(found, metadata, [piece for piece in pieces if piece.name in fits.names] + random))
    set_random(random, world)
    return dict(found.state)


def _fill(found: Found, metadata: Any, pieces: list[Piece]) -> Any:
    try:
        with torch.no_grad():
            yield from read_pieces(found.path, metadata, pieces)
    except Damage as damage:
        raise _unreadable(damage, found.path) from damage
