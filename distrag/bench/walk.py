"""One epoch walked in a process of its own: seconds of each part, and the memory it takes beyond the lengths."""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distrag.batching.plan import Cost, plan_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distrag.batching.compiled import Ints

RESUME_AT = 2 / 3
"""The share of an epoch that a resume has behind it."""


class Seconds(NamedTuple):
    """How long something took.

    Attributes:
        cpu: seconds of the process, system time included.
        wall: seconds on the wall.
    """

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Seconds:
        """Returns both clocks."""
        return cls(time.process_time(), time.perf_counter())

    def since(self, before: Seconds) -> Seconds:
        """Returns what has passed from `before` to this."""
        return Seconds(self.cpu - before.cpu, self.wall - before.wall)


class Walk(NamedTuple):
    """One epoch as one rank reads it.

    Attributes:
        construct: until the plan or sampler is there.
        first_step: until the first batch is there, from nothing.
        epoch: until the last batch is there, from nothing.
        resume: until the batch at two thirds of the epoch is there, from a plan or sampler that has given nothing yet.
        num_steps: batches.
        peak_bytes: most memory at any time beyond what the process had with the lengths in it; NaN where the system does not tell.
    """

    construct: Seconds
    first_step: Seconds
    epoch: Seconds
    resume: Seconds
    num_steps: int
    peak_bytes: float


@dataclass(frozen=True)
class Task:
    """What to walk.

    Attributes:
        path: file of int32 lengths.
        num_samples: how many of them (`N`).
        world_size: ranks (`W`).
        samples_a_rank: mean samples of a rank in a step.
        cost: `(a, b, c)` of the plan.
        repeats: epochs walked by the plan, whose medians count.
    """

    path: str
    num_samples: int
    world_size: int
    samples_a_rank: int
    cost: Cost
    repeats: int = 3


def walk_plan(task: Task) -> Walk:
    """Returns the walk of distrag's plan under `max_tokens`; seconds are medians over as many epochs as the task repeats."""
    lengths = _read(task)
    budget = max(int(task.samples_a_rank * lengths.mean()), int(lengths.max()))

    def plan(seed: int, its: Ints = lengths) -> Any:
        return plan_epoch(its, world_size=task.world_size, max_tokens=budget, cost=task.cost, seed=seed)

    # Compiled functions are loaded, or compiled once on a machine, before the clock runs: small and large plans take different ones.
    for few in (1_000, 1 << 21):
        plan(0, np.full(few, 4, np.int32)).samples(0, 0)
    memory, peak, walks = Memory(), 0.0, []
    for seed in range(task.repeats):
        started = Seconds.now()
        made = plan(seed)
        constructed = Seconds.now()
        made.samples(0, 0)
        first = Seconds.now()
        for step in range(1, made.num_steps):
            made.samples(step, 0)
        done, num_steps = Seconds.now(), made.num_steps
        peak = peak or memory.peak_bytes()  # of the first epoch: what a later one finds free was asked for by that one
        del made
        made = plan(seed)
        resumed = Seconds.now()
        made.samples(int(num_steps * RESUME_AT), 0)
        walks.append([at.since(started) for at in (constructed, first, done)] + [Seconds.now().since(resumed)])
        del made
    construct, first_step, epoch, resume = (_median(part) for part in zip(*walks, strict=True))
    return Walk(construct, first_step, epoch, resume, num_steps, peak)


def walk_random(task: Task) -> Walk:
    """Returns the walk of torch's `BatchSampler(RandomSampler)`; it knows no ranks, so a batch is a global one."""
    from torch.utils.data import BatchSampler, RandomSampler

    size = task.world_size * task.samples_a_rank
    return _walk_sampler(lambda: BatchSampler(RandomSampler(range(task.num_samples)), size, drop_last=False))


def walk_grouped(task: Task) -> Walk:
    """Returns the walk of transformers' `LengthGroupedSampler`, or of its algorithm restated where transformers is not installed."""
    from torch.utils.data import BatchSampler

    lengths, size = _read(task).tolist(), task.world_size * task.samples_a_rank
    try:
        sampler: Any = importlib.import_module("transformers.trainer_pt_utils").LengthGroupedSampler
    except ImportError:
        sampler = _Grouped
    return _walk_sampler(lambda: BatchSampler(sampler(size, lengths=lengths), size, drop_last=False))


def grouped_name() -> str:
    """Returns what `walk_grouped` walks."""
    try:
        return f"LengthGrouped, {version('transformers')}"
    except ImportError:
        return "LengthGrouped, restated"


class _Grouped:
    """Batches of like length: a permutation cut into mega-batches of 50 batches, each sorted by length, the longest sample first of all."""

    def __init__(self, batch_size: int, *, lengths: list[int]) -> None:
        self.batch_size, self.lengths = batch_size, lengths

    def __iter__(self) -> Iterator[int]:
        import torch

        n = len(self.lengths)
        size = self.batch_size * max(1, min(n // (self.batch_size * 4), 50))
        order = torch.randperm(n)
        groups = [sorted(order[i : i + size].tolist(), key=lambda sample: self.lengths[sample], reverse=True) for i in range(0, n, size)]
        longest = max(range(len(groups)), key=lambda group: self.lengths[groups[group][0]])
        groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
        return itertools.chain.from_iterable(groups)


def _walk_sampler(build: Callable[[], Any]) -> Walk:
    import torch

    torch.set_num_threads(1)
    memory = Memory()
    started = Seconds.now()
    sampler = build()
    constructed = Seconds.now()
    batches = iter(sampler)
    next(batches)
    first = Seconds.now()
    num_steps = 1 + sum(1 for _ in batches)
    done, peak = Seconds.now(), memory.peak_bytes()
    sampler = build()
    again = Seconds.now()
    for _ in itertools.islice(sampler, int(num_steps * RESUME_AT) + 1):  # a sampler without a state is run through again
        pass
    resume = Seconds.now().since(again)
    return Walk(constructed.since(started), first.since(started), done.since(started), resume, num_steps, peak)


def _read(task: Task) -> Ints:
    return np.fromfile(task.path, np.int32, count=task.num_samples)


def _median(parts: Iterable[Seconds]) -> Seconds:
    parts = list(parts)
    return Seconds(median(part.cpu for part in parts), median(part.wall for part in parts))


class Memory:
    """Peak memory of this process from here on, from Linux's own count; what was freed before is given back first."""

    def __init__(self) -> None:
        gc.collect()
        self._before = float("nan")
        if Path("/proc/self/clear_refs").exists():
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
            if trim is not None:
                trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
            self._before = _resident("VmRSS")

    def peak_bytes(self) -> float:
        """Returns the most bytes that were resident at once beyond those at the start."""
        return float("nan") if np.isnan(self._before) else _resident("VmHWM") - self._before


def _resident(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024.0 * int(line.split()[1])
