"""What some steps of training come to, for a comparison: the loss of each, and the state after them, where other processes can read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distrag.training.build import Job, build_sampler
from distrag.training.fit import Fit
from distrag.training.metrics import MetricsWriter
from distrag.world import World

Array = NDArray[Any]
_CHUNK = 1 << 22  # numbers compared at a time


class _Passing(Fit):
    """A fit of which nothing is kept: it saves no checkpoint and evaluates nothing."""

    def _save(self, kept: str = "") -> None:
        self.saved_at = self.step

    def _evaluate(self) -> None:
        self.evaluated_at = self.step


def train_steps(job: Job) -> list[float]:
    """Trains a job for `train.max_steps` and returns the loss of each logged step. A collective: every rank calls it.

    Nothing is written: no metrics, no checkpoint, no result.

    Args:
        job: from `build_job`; with `train.log_every` 1 every step is logged.
    """
    writer = MetricsWriter(Path(), active=False, tensorboard=False)
    fit = _Passing(job, build_sampler(job), writer, Path(job.config.train.run_dir))
    fit.run()
    return fit.losses


def save_state(model: nn.Module, folder: Path, world: World) -> None:
    """Writes all parameters and buffers of a model: sharded tables as one file each, which all ranks fill, the rest once for each rank.

    A collective: every rank calls it. The folder has to be on this machine.

    Args:
        model: a DistributedModelParallel, or the plain module.
        folder: an existing folder, the same for all ranks.
        world: the ranks.
    """
    own: dict[str, Array] = {}
    sharded: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        plain_name = name.removeprefix("module.")
        if hasattr(value, "local_shards"):
            sharded[plain_name] = value
        else:
            own[plain_name] = _array(value)
    if world.rank == 0:
        for name, value in sharded.items():
            np.lib.format.open_memmap(_path(folder, name), "w+", np.float32, tuple(value.metadata().size))
    np.savez(folder / f"rank-{world.rank}.npz", **own)  # type: ignore[arg-type]
    world.barrier()
    for name, value in sharded.items():
        whole = np.load(_path(folder, name), mmap_mode="r+")
        for piece in value.local_shards():
            (row, column), (rows, columns) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
            whole[row : row + rows, column : column + columns] = _array(piece.tensor)
        whole.flush()
    world.barrier()


def _array(value: torch.Tensor) -> Array:
    return value.detach().cpu().numpy()


def _path(folder: Path, name: str) -> Path:
    return folder / f"table-{name}.npy"


def read_state(folder: Path, rank: int = 0) -> dict[str, Array]:
    """Returns what `save_state` wrote, by name; tables are mapped, not read.

    Args:
        folder: where it was written.
        rank: whose copy of what is replicated.
    """
    with np.load(folder / f"rank-{rank}.npz") as file:
        own = {name: file[name] for name in file.files}
    tables = {path.stem.removeprefix("table-"): np.load(path, mmap_mode="r") for path in sorted(folder.glob("table-*.npy"))}
    return {**own, **tables}


@dataclass(frozen=True)
class Difference:
    """The largest difference between two states, and where it is.

    Attributes:
        largest: absolute difference; 0 where nothing was compared, NaN where a side is no number and the other is.
        where: name and index of the element; empty where there is no difference.
        got: its value on one side.
        wanted: its value on the other.
    """

    largest: float = 0.0
    where: str = ""
    got: float = 0.0
    wanted: float = 0.0

    def worse(self, other: Difference) -> Difference:
        """Returns the larger of the two; a NaN is the largest."""
        return other if other.largest > self.largest or other.largest != other.largest else self


def compare_states(got: dict[str, Array], wanted: dict[str, Array], takes: Callable[[str], bool] = lambda name: True) -> Difference:
    """Returns the largest difference over the named arrays that `takes` takes, a piece at a time.

    Raises:
        AssertionError: the two have not the same names and shapes.
    """
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    worst = Difference()
    for name in filter(takes, wanted):
        worst = worst.worse(_compare(name, got[name], wanted[name]))
    return worst


def _compare(name: str, got: Array, wanted: Array) -> Difference:
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    worst = Difference()
    if not wanted.ndim:
        got, wanted = got.reshape(1), wanted.reshape(1)
    rows = max(1, _CHUNK // max(1, int(np.prod(wanted.shape[1:]))))
    for at in range(0, len(wanted), rows):
        a, b = (np.asarray(side[at : at + rows], np.float64) for side in (got, wanted))
        apart = np.abs(a - b)
        apart[np.isnan(a) & np.isnan(b)] = 0.0
        if apart.size:
            flat = int(apart.argmax())  # a NaN is the largest
            index = np.unravel_index(flat, apart.shape)
            place = [int(index[0]) + at, *map(int, index[1:])]
            worst = worst.worse(Difference(float(apart[index]), f"{name}{place}", float(a[index]), float(b[index])))
    return worst
