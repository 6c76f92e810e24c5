"""Ranks as plain processes that find each other as those of Slurm's srun do: what they print, and how each of them ends, is theirs."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ended:
    """How the processes ended.

    Attributes:
        codes: exit code of every rank.
        said: what every rank printed.
        at: when the last one was gone, in seconds since the epoch.
    """

    codes: list[int]
    said: list[str]
    at: float


def run_processes(act: Callable[[], object], world_size: int) -> Ended:
    """Runs `act` on so many ranks, which start their own process group, and waits for the last of them to be gone."""
    import torchrec.distributed.model_parallel  # noqa: F401 - once here instead of seconds in every fork

    gc.collect()
    torch.set_num_threads(1)  # as torchrun does: sums come out in one order
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    pipes = [os.pipe() for _ in range(world_size)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, world_size, port, act, pipes)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for _, end in pipes:
        os.close(end)
    with ThreadPoolExecutor(world_size) as readers:
        said = list(readers.map(_read, [start for start, _ in pipes]))
    for process in processes:
        process.join()
    return Ended([process.exitcode or 0 for process in processes], said, time.time())


def _read(pipe: int) -> str:
    with open(pipe, encoding="utf-8") as text:
        return text.read()


def _rank(rank: int, world_size: int, port: int, act: Callable[[], object], pipes: list[tuple[int, int]]) -> None:
    gc.freeze()  # what earlier tests left to the collector would wait here for threads that a fork does not have
    os.dup2(pipes[rank][1], 1)
    os.dup2(pipes[rank][1], 2)
    for start, end in pipes:
        os.close(start)
        os.close(end)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False)) for n in (1, 2))  # pytest has put its own there
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "localhost", **{name: str(value) for name, value in sizes.items()}})
    act()


def children_of(pid: int) -> list[int]:
    """Returns the processes that `pid` started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for path in tasks for child in path.read_text().split())
