"""Saves and loads a run's state: tables, dense part, optimizers; whole or not at all.

A checkpoint is a folder. It is written under another name and renamed when it is whole, and the former one of its name is removed only
after that: whenever a process is killed, `find_checkpoint` finds a whole one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.world import World

_EXTRA = "state.json"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)  # TorchRec's shards, not a choice of ours
        yield


def _state(parallel: Parallel, optimizer: Any | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": parallel.model.state_dict()}
    if optimizer is not None:
        state["optim"] = _without_empty(optimizer.state_dict())
    return state


def _without_empty(state: dict[str, Any]) -> dict[str, Any]:
    # Fused SGD keeps `{}` per table, which the checkpoint reader reports as a missing key.
    return {**state, "state": {name: value for name, value in state["state"].items() if value}}


def _random_state(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """Returns this rank's torch generators under its number. distrag draws from counters; a user's encoder may not."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return {f"rank-{world.rank}": states}


def _table_groups(parallel: Parallel) -> list[Any]:
    """Returns FBGEMM's groups of sharded tables, which TorchRec keeps out of sight of `modules()`."""
    lookups = [lookup for module in parallel.model.modules() for lookup in getattr(module, "_lookups", [])]
    return [module for lookup in lookups for module in lookup.modules() if hasattr(module, "iter_cpu")]


def _count_lookups(parallel: Parallel) -> torch.Tensor:
    """Returns how often tables were looked up, int64 `[1]`: fused Adam corrects its moments by it, and no state dict has it."""
    return torch.tensor([max((int(group.iter_cpu) for group in _table_groups(parallel)), default=0)])


def save_checkpoint(path: Path, parallel: Parallel, optimizer: Any | None, extra: dict[str, Any], world: World) -> None:
    """Writes a checkpoint; a former one of that name stays usable until this one is whole. Every rank calls it.

    Args:
        path: folder of the checkpoint.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None to save weights only.
        extra: small JSON-able values (step, epoch, metric).
        world: the ranks.
    """
    part = Path(world.broadcast_object(world.on_first(lambda: str(_begin(path)))))
    lookups = world.all_reduce_max(_count_lookups(parallel))
    with _quiet():
        save({**_state(parallel, optimizer), "lookups": lookups, "random": _random_state(world)}, checkpoint_id=str(part))
    world.on_first(lambda: _publish(part, path, extra))


def _begin(path: Path) -> Path:
    for stale in path.parent.glob(f"{path.name}.part*"):
        shutil.rmtree(stale, ignore_errors=True)
    # A name of its own: a rank that outlives a killed run for a moment cannot write into the save of the next.
    part = path.with_name(f"{path.name}.part-{os.getpid()}-{time.time_ns()}")
    part.mkdir(parents=True)
    return part


def _publish(part: Path, path: Path, extra: dict[str, Any]) -> None:
    write_whole(part / _EXTRA, json.dumps(extra))
    _swap(part, path)


def _swap(part: Path, path: Path) -> None:
    """Puts a whole folder in the place of the former one."""
    old = path.with_name(path.name + ".old")
    if path.exists():  # else a save was cut between the two renames, and `.old` is the only whole one until the second
        _remove(old)
        path.rename(old)
    part.rename(path)
    _remove(old)


def _remove(folder: Path) -> None:
    (folder / _EXTRA).unlink(missing_ok=True)  # first: half a folder must not be taken for a whole one
    shutil.rmtree(folder, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the process is killed."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def keep_checkpoint(path: Path, name: Path, world: World) -> None:
    """Keeps a checkpoint under another name too, by links where the file system has them; every rank calls it.

    Args:
        path: the checkpoint; it may be replaced afterwards without touching the other name.
        name: folder to keep it under; a former one of that name stays usable until this one is whole.
        world: the ranks.
    """

    def keep() -> None:
        part = _begin(name)
        for file in find_checkpoint(path).iterdir():
            try:
                os.link(file, part / file.name)
            except OSError:
                shutil.copy2(file, part / file.name)
        _swap(part, name)

    world.on_first(keep)


def find_checkpoint(path: Path) -> Path:
    """Returns the whole checkpoint of that name: itself, or the former one if a save was cut between its two renames.

    Raises:
        ValueError: there is none.
    """
    for candidate in (path, path.with_name(path.name + ".old")):
        if (candidate / _EXTRA).exists():
            return candidate
    raise problem(
        "No whole checkpoint", got="none", wanted=f"a folder with {_EXTRA}", where=path, todo="train the run to its first evaluation"
    )


def has_checkpoint(path: Path) -> bool:
    """Returns whether there is a whole checkpoint of that name."""
    return any((folder / _EXTRA).exists() for folder in (path, path.with_name(path.name + ".old")))


def read_extra(path: Path) -> dict[str, Any]:
    """Returns the extra values of a checkpoint.

    Raises:
        ValueError: there is no whole checkpoint, or its values cannot be read.
    """
    file = find_checkpoint(path) / _EXTRA
    try:
        extra: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        todo = "remove this checkpoint, and train the run again"
        raise problem("The values of a checkpoint cannot be read", got=error, wanted="JSON", where=file, todo=todo) from None
    return extra


def change_extra(path: Path, extra: dict[str, Any], world: World) -> None:
    """Replaces the extra values of a checkpoint, whole or not at all; every rank calls it."""
    world.on_first(lambda: write_whole(find_checkpoint(path) / _EXTRA, json.dumps(extra)))


def load_checkpoint(path: Path, parallel: Parallel, optimizer: Any | None = None, *, generators_of: World | None = None) -> dict[str, Any]:
    """Fills the model (and optimizer) from a checkpoint of any world size; returns its extra values. Every rank calls it.

    Args:
        path: folder of the checkpoint.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None to load weights only.
        generators_of: the ranks, to put torch's generators back too; only for a checkpoint of as many ranks on the same kind of device.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    found = find_checkpoint(path)
    with _quiet():
        # A fresh optimizer has no state to load into. Making it takes a real step, which may move weights: they are loaded after.
        for _name, part in optimizer.optimizers if optimizer is not None else ():
            part.init_state()
        state = _state(parallel, optimizer)
        if optimizer is not None:
            state["lookups"] = _count_lookups(parallel)
        if generators_of is not None:
            state["random"] = _random_state(generators_of)
        load(state, checkpoint_id=str(found))
        parallel.model.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(_with_empty(state["optim"], optimizer.state_dict()))
            for group in _table_groups(parallel):
                group.iter_cpu.fill_(int(state["lookups"]))
                group.iter.fill_(int(state["lookups"]))
    if generators_of is not None:
        _set_random_state(state["random"][f"rank-{generators_of.rank}"], generators_of)
    return read_extra(found)


def _set_random_state(states: dict[str, torch.Tensor], world: World) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)


def _with_empty(state: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    empty = {name: value for name, value in template["state"].items() if not value}
    return {**state, "state": {**empty, **state["state"]}}
