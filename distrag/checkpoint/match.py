"""What of a checkpoint fits a model: what differs is refused by name and shape, and states that mean nothing here are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distrag.checkpoint.pieces import FUSED_SLOTS, SLOTS, Size, read_kinds, read_sizes
from distrag.parallel import Parallel
from distrag.problem import problem

_SHOWN = 40


@dataclass(frozen=True)
class Match:
    """How a checkpoint fits a model and its optimizers.

    Attributes:
        differences: one line for each parameter or state that is missing, additional or of another shape.
        names: the tensors to load.
        anew: parameter -> (kind of the saved optimizer, kind now), where the state cannot go on.
    """

    differences: list[str]
    names: frozenset[str]
    anew: dict[str, tuple[str, str]]


def match(saved: Mapping[str, Size], parallel: Parallel, optimizer: Any | None) -> Match:
    """Returns how a checkpoint fits, the same on every rank.

    Args:
        saved: sizes of the checkpoint's tensors.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None where only weights matter.
    """
    wanted = {name: size for name, (size, _) in read_sizes(parallel).items()}
    model = {name: size for name, size in saved.items() if name.startswith("model.")}
    differences = [_line(name, model.get(name), wanted.get(name)) for name in {**model, **wanted} if model.get(name) != wanted.get(name)]
    names, anew = set(wanted), {}
    if optimizer is not None:
        states = _saved_states(saved)
        for name, kind in read_kinds(parallel, optimizer).items():
            slots = _slots(name, kind, wanted[f"model.{name}"])
            kinds = states.get(name, {})
            there = {slot: saved[slot] for slot in slots if slot in saved}
            if model.get(f"model.{name}") != wanted[f"model.{name}"]:
                continue  # said already
            if kind in kinds:
                differences += [_line(slot, there.get(slot), size) for slot, size in slots.items() if there.get(slot) != size]
                names |= slots.keys()
            elif slots:
                anew[name] = (next(iter(kinds), "none"), kind)
    return Match(sorted(differences), frozenset(names), anew)


def _saved_states(saved: Mapping[str, Size]) -> dict[str, dict[str, None]]:
    """Returns the kinds of optimizer of which a checkpoint has states, by parameter."""
    states: dict[str, dict[str, None]] = {}
    for name in saved:
        if name.startswith("optim."):
            parameter, kind, _slot = name.removeprefix("optim.").rsplit(".", 2)
            states.setdefault(parameter, {})[kind] = None
    return states


def _slots(name: str, kind: str, size: Size) -> dict[str, Size]:
    sizes = {"step": (), "sum": size[:1] if kind == "rowwise_adagrad" else size}
    return {f"optim.{name}.{kind}.{slot}": sizes.get(slot, size) for slot in (SLOTS | FUSED_SLOTS)[kind]}


def _line(name: str, saved: Size | None, wanted: Size | None) -> str:
    shown = ["nothing" if size is None else list(size) for size in (saved, wanted)]
    return f"{name.removeprefix('model.')}: saved {shown[0]}, wanted {shown[1]}"


def check_match(found: Match, where: Path, todo: str) -> None:
    """Refuses a checkpoint that does not fit.

    Raises:
        ValueError: with every parameter and state that differs: its name, the shape saved, the shape wanted.
    """
    if found.differences:
        more = len(found.differences) - _SHOWN
        lines = [*found.differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        got = f"{len(found.differences)} differences\n            " + "\n            ".join(lines)
        raise problem("The checkpoint does not fit the config", got=got, wanted="the same names and shapes", where=where, todo=todo)
