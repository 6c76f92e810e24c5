"""Saves and loads a run's state: tables, dense part, optimizers; whole or not at all."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def save_checkpoint(path: Path, parallel: Parallel, optimizer: Any | None, extra: dict[str, Any], world: World) -> None:
    """Writes a checkpoint; a former one of that name stays usable until this one is whole. Every rank calls it.

    Args:
        path: folder of the checkpoint.
        parallel: the sharded model.
        optimizer: its CombinedOptimizer, or None to save weights only.
        extra: small JSON-able values (step, epoch, metric).
        world: the ranks.
    """
    part = path.with_name(path.name + ".part")
    world.on_first(lambda: _clear(part))
    with _quiet():
        save(_state(parallel, optimizer), checkpoint_id=str(part))
    world.on_first(lambda: _publish(part, path, extra))


def _clear(part: Path) -> None:
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _publish(part: Path, path: Path, extra: dict[str, Any]) -> None:
    (part / _EXTRA).write_text(json.dumps(extra))
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)


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


def load_checkpoint(path: Path, parallel: Parallel, optimizer: Any | None = None) -> dict[str, Any]:
    """Fills the model (and optimizer) from a checkpoint of any world size; returns its extra values. Every rank calls it.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    found = find_checkpoint(path)
    if optimizer is not None:
        # A fresh optimizer has no state to load into. Making it takes a real step, which may move weights: they are loaded after.
        for _name, part in optimizer.optimizers:
            part.init_state()
    state = _state(parallel, optimizer)
    with _quiet():
        load(state, checkpoint_id=str(found))
    parallel.model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(_with_empty(state["optim"], optimizer.state_dict()))
    extra: dict[str, Any] = json.loads((found / _EXTRA).read_text())
    return extra


def _with_empty(state: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    empty = {name: value for name, value in template["state"].items() if not value}
    return {**state, "state": {**empty, **state["state"]}}
