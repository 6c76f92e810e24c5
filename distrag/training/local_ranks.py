"""Ranks that a command starts on this machine by itself, without torchrun: processes that meet at a file."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from distrag.encoder import ENCODERS
from distrag.loss import LOSSES
from distrag.problem import problem
from distrag.world import join_world

_METHOD = "forkserver"  # imports torch once, and forks before anything has started a thread or a GPU
_PRELOADED = ["torchrec.distributed.model_parallel", "numba", "pyarrow", "jsonargparse"]
"""What the server imports. Not distrag: the server does not know this process's path, and could find another copy."""


def run_local_ranks(
    act: Callable[..., None], world_size: int, arguments: tuple[Any, ...], folder: Path, *, device: str, timeout_s: float
) -> None:
    """Runs `act(world, *arguments)` on `world_size` ranks and returns when all have ended.

    What this process has added to ENCODERS and LOSSES is there in the ranks too.

    Args:
        act: a function of a module, which can be imported.
        world_size: number of ranks.
        arguments: what pickle takes.
        folder: existing, of this call alone; the ranks meet in it.
        device: `cpu` or `cuda`.
        timeout_s: how long a collective may wait for another rank, in seconds.

    Raises:
        ValueError: a rank failed, with the first error; the others are ended.
    """
    own = _pickled({"encoder": dict(ENCODERS), "loss": dict(LOSSES)})
    get_context(_METHOD).set_forkserver_preload(_PRELOADED)
    given = (world_size, folder, device, timeout_s, own, act, arguments)
    started: Any = start_processes(_run, given, world_size, join=False, start_method=_METHOD)  # type: ignore[no-untyped-call]
    try:
        while not started.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise _failed(folder, world_size, error) from None
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
                process.join()


def _pickled(tables: dict[str, dict[str, Any]]) -> bytes:
    for table, named in tables.items():
        for name, kind in named.items():
            try:
                pickle.dumps(kind)
            except (pickle.PicklingError, AttributeError) as error:
                todo = "define the class at the top level of a module and import it from there"
                wanted = "a class that other processes can import"
                raise problem(
                    f"Ranks cannot be given this {table}", got=error, wanted=wanted, where=f"{table} {name!r}", todo=todo
                ) from None
    return pickle.dumps(tables)


def _run(
    rank: int, size: int, folder: Path, device: str, timeout_s: float, own: bytes, act: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    tables = pickle.loads(own)
    ENCODERS.update(tables["encoder"])
    LOSSES.update(tables["loss"])
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    try:
        with join_world(rank, size, folder / "meeting", device, timeout_s=timeout_s) as world:
            act(world, *arguments)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        (folder / f"error-{rank}").write_text(text)
        raise SystemExit(1) from None


def _failed(folder: Path, world_size: int, error: Exception) -> ValueError:
    """Returns the error of the rank that failed first."""
    told = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    rank = told[0].name.removeprefix("error-") if told else ""
    got = f"rank {rank}: {told[0].read_text().strip()}" if told else str(error)
    todo = "mend what the rank says; `distrag train` of this config on one rank shows it alone"
    return problem(
        "A rank failed", got=got, wanted=f"{world_size} ranks that train", where=f"{world_size} rank(s) of this machine", todo=todo
    )
