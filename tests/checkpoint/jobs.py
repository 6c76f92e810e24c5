"""Jobs whose whole state is one number, so that a test sees which save a checkpoint is of, and processes that end in a save."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distrag.checkpoint import Found, load_checkpoint
from distrag.config import read_config
from distrag.training.build import Job, build_job
from distrag.training.optim import build_optimizer
from distrag.world import start_world
from tests.training.runs import config

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree", "shutil.copyfile")


def build(store: Path, run_dir: Path, **changes: Any) -> tuple[Job, Any]:
    """Returns a job and its optimizer, with a state for every parameter as after the first step."""
    job = build_job(read_config(config(store, run_dir, **changes)), start_world("cpu"))
    optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
    for _name, part in optimizer.optimizers:
        part.init_state()
    return job, optimizer


def fill(job: Job, optimizer: Any, value: float) -> None:
    """Sets every weight and state that lies on this rank."""
    with torch.no_grad():
        for tensor in tensors_of(job, optimizer):
            tensor.fill_(value)


def values_of(job: Job, optimizer: Any) -> set[float]:
    """Returns the values that occur in the weights and states of this rank."""
    return {float(v) for tensor in tensors_of(job, optimizer) for v in tensor.reshape(-1).unique()}


def tensors_of(job: Job, optimizer: Any) -> list[torch.Tensor]:
    """Returns every weight and state that lies on this rank."""
    found = [parameter.detach() for parameter in job.parallel.dense.values()]
    found += [piece for _row, _column, piece in job.parallel.item_shards("item")]
    for slots in optimizer.state_dict()["state"].values():
        for value in slots.values():
            found += [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
    return [tensor for tensor in found if tensor.numel()]


def loaded(job: Job, optimizer: Any, source: Path | Found) -> tuple[int, set[float]]:
    """Loads a checkpoint; returns the number in its state, and the values of everything loaded."""
    fill(job, optimizer, -1.0)
    number = load_checkpoint(source, job.parallel, optimizer, job.world)["step"]
    return number, values_of(job, optimizer)


def on_event(act: Callable[[int, str], None]) -> None:
    """Calls `act(number, path)` for each thing that this process does to files from here on."""
    seen = [0]

    def watch(name: str, given: tuple[Any, ...]) -> None:
        if name in FILE_EVENTS and not (name == "open" and str(given[0]).startswith(("/proc", "/sys", "/dev"))):
            seen[0] += 1
            act(seen[0], str(given[0]))

    sys.addaudithook(watch)


def die_at(event: int) -> None:
    """Kills this process with signal 9 at the `event`-th thing that it does to files from here on."""
    on_event(lambda number, _path: os.kill(os.getpid(), signal.SIGKILL) if number == event else None)


def slow_down(part: str, seconds: float) -> None:
    """Makes this process wait before it opens a file whose path has `part` in it."""
    on_event(lambda _number, path: time.sleep(seconds) if part in path else None)


def hold_back(part: str, gate: Path) -> None:
    """Makes this process wait for the file `gate` before it opens a file whose path has `part` in it."""

    def wait(_number: int, path: str) -> None:
        while part in path and not gate.exists():
            time.sleep(0.01)

    on_event(wait)


def is_killed(act: Callable[[], None]) -> bool:
    """Runs `act` in a fork of this process, which may have built a job; returns whether a signal ended it."""
    pid = os.fork()
    if not pid:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the process failed instead of being killed"
    return os.WIFSIGNALED(status)
