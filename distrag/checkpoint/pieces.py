"""What a model and its optimizers hold, as named pieces of whole tensors: the same names whatever ranks and sharding.

`model.tables.item.weight`, `model.encoder...`; `optim.tables.item.weight.rowwise_adagrad.sum`: parameter, kind of optimizer, slot. The kind
is part of the name because a state means nothing to another optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.world import World

Size = tuple[int, ...]
_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd",
}
SLOTS = {"adam": ("step", "exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "sgd": ()}
"""State of a parameter under torch's optimizers that a next step reads. Adagrad counts steps too, for a decay that is never set."""
FUSED_SLOTS = {"rowwise_adagrad": ("sum",), "adagrad": ("sum",), "sgd": (), "fused_adam": ("momentum1", "exp_avg_sq")}
_TABLES = re.compile(r"^tables\.(sharded|replicated)\.embeddings\.")


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that lies on this rank.

    Attributes:
        name: of the whole tensor.
        size: of the whole tensor.
        offsets: where in it the piece begins.
        tensor: the piece itself, not a copy.
        alike: whether every rank holds the whole tensor, with the same values.
    """

    name: str
    size: Size
    offsets: Size
    tensor: torch.Tensor
    alike: bool


def plain_name(name: str) -> str:
    """Returns the name of a parameter without how its table is kept: `tables.item.weight`."""
    return _TABLES.sub("tables.", name)


def fused_kind(parallel: Parallel) -> str:
    """Returns the kind of the sharded tables' optimizer."""
    return "fused_adam" if parallel.table_optimizer == "adam" else parallel.table_optimizer


def read_model(parallel: Parallel) -> Iterator[Piece]:
    """Yields this rank's pieces of every parameter and buffer."""
    for name, value in parallel.model.state_dict().items():
        yield from _pieces(f"model.{plain_name(name)}", value)


def read_sizes(parallel: Parallel) -> dict[str, tuple[Size, bool]]:
    """Returns size, and whether it is a sharded table, of every parameter and buffer, the same on every rank."""
    values = {f"model.{plain_name(name)}": value for name, value in parallel.model.state_dict().items()}
    return {name: (_size(value), hasattr(value, "local_shards")) for name, value in values.items()}


def _size(value: Any) -> Size:
    return tuple(value.metadata().size) if hasattr(value, "local_shards") else tuple(value.shape)


def _pieces(name: str, value: Any) -> Iterator[Piece]:
    if hasattr(value, "local_shards"):
        for shard in value.local_shards():
            if shard.tensor.numel():  # a table of few rows leaves ranks without any
                yield Piece(name, _size(value), tuple(shard.metadata.shard_offsets), shard.tensor.detach(), alike=False)
    elif isinstance(value, torch.Tensor):
        yield Piece(name, _size(value), (0,) * value.dim(), value.detach(), alike=True)
    else:
        todo = "register it as a buffer, or leave it out of the module's state_dict"
        raise problem("A module's state is no tensor", got=type(value).__name__, wanted="tensors", where=name, todo=todo)


def read_states(parallel: Parallel, optimizer: Any) -> Iterator[Piece]:
    """Yields this rank's pieces of the state of every optimizer.

    Args:
        parallel: the sharded model.
        optimizer: its CombinedOptimizer.
    """
    fused, kind = parallel.model.fused_optimizer, fused_kind(parallel)
    for name, slots in fused.state_dict()["state"].items():
        table = plain_name(name)
        for key, value in slots.items():
            slot = key.removeprefix(f"{table.split('.')[1]}.")
            slot = "sum" if kind in ("rowwise_adagrad", "adagrad") and slot == "momentum1" else slot
            yield from _pieces(f"optim.{table}.{kind}.{slot}", value)
    for name, parameter, kind, state in _dense_states(parallel, optimizer):
        for slot in SLOTS[kind]:
            if slot in state.get(parameter, {}):
                yield from _pieces(f"optim.{name}.{kind}.{slot}", state[parameter][slot])


def _dense_states(parallel: Parallel, optimizer: Any) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
    for _, part in optimizer.optimizers:
        if part is not parallel.model.fused_optimizer:
            for name, parameter in part.params.items():
                yield plain_name(name), parameter, _KINDS[type(part._optimizer)], part.state


def read_kinds(parallel: Parallel, optimizer: Any) -> dict[str, str]:
    """Returns the kind of optimizer of every parameter that has one, the same on every rank."""
    sharded = {name.removeprefix("model."): fused_kind(parallel) for name, (_, is_table) in read_sizes(parallel).items() if is_table}
    return sharded | {name: kind for name, _, kind, _ in _dense_states(parallel, optimizer)}


def begin_states(parallel: Parallel, optimizer: Any, names: Collection[str]) -> None:
    """Makes the state that a fresh Adam makes in its first step, for each parameter whose saved state is in `names`.

    The library's way is to take a step, which may move weights.
    """
    for name, parameter, kind, state in _dense_states(parallel, optimizer):
        if kind == "adam" and not state.get(parameter) and f"optim.{name}.adam.step" in names:
            state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def share(pieces: Iterator[Piece], world: World) -> list[Piece]:
    """Returns the pieces that this rank writes: its own ones, and its share of those that all ranks hold alike."""
    mine, load = [], [0] * world.size
    for piece in sorted(pieces, key=lambda piece: (-piece.tensor.nbytes, piece.name)):
        if not piece.alike:
            mine.append(piece)
            continue
        rank = load.index(min(load))
        load[rank] += piece.tensor.nbytes
        if rank == world.rank:
            mine.append(piece)
    return mine


def read_random(world: World) -> Iterator[Piece]:
    """Yields this rank's torch generators under its number. distrag draws from counters; a user's encoder may not."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    for kind, state in states.items():
        yield Piece(f"random.rank-{world.rank}.{kind}", tuple(state.shape), (0,), state, alike=False)


def set_random(pieces: list[Piece], world: World) -> None:
    """Puts this rank's generators where `read_random` found them."""
    for piece in pieces:
        if piece.name.endswith(".cpu"):
            torch.set_rng_state(piece.tensor)
        else:
            torch.cuda.set_rng_state(piece.tensor, world.device)
