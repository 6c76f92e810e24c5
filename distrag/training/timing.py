"""What each rank's own part of a step takes, apart from what it waits for: its data, and the other ranks.

Ranks move in step: whoever is early waits inside the exchange of ids, vectors and gradients, so that the wall time of a step is the same
on all of them and says nothing. A rank's **own** seconds are therefore taken where it waits for nobody: from the arrival of the looked-up
vectors, through encoder, head and loss and back again, to the gradient of those vectors; and from the end of the backward to the end of
the optimizer's step. What is left of the step is **exchange**: the lookups and table updates themselves, and all waiting for others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from distrag.batch import RaggedBatch
from distrag.batching.loader import Loader

MOST_STEPS = 64
"""Steps of which a line of metrics knows the times of each; of a longer stretch it is the last."""
MOST_RANKS = 64
"""Up to so many ranks a line of metrics names each; beyond, least, mean and most."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class StepWatch:
    """Times this rank's steps; on CUDA with events, so that nothing waits for the device until the numbers are taken.

    Args:
        tables: the model's tables; their lookup ends the first exchange of a step. None where there is one rank, and all of a step its own.
        device: where this rank computes.
    """

    def __init__(self, tables: nn.Module | None, device: torch.device) -> None:
        self.device, self.alone = device, tables is None
        self._steps: deque[tuple[dict[str, Any], float]] = deque(maxlen=MOST_STEPS)
        self._marks: dict[str, Any] | None = None
        self._hook = None if tables is None else tables.register_forward_hook(self._looked_up)

    def begin(self) -> None:
        """Marks the start of a step, its batch at hand."""
        self._marks = {}
        self.mark("begin")

    def mark(self, name: str) -> None:
        """Notes the time at which this rank's device gets here; the first of a name counts, of gradients the last."""
        if self._marks is None or (name in self._marks and name != "gradients"):
            return
        if self.device.type == "cuda":
            self._marks[name] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._marks[name].record()
        else:
            self._marks[name] = time.perf_counter()

    def end(self, wait_s: float) -> None:
        """Marks the end of a step.

        Args:
            wait_s: how long this rank had waited for its batch, in seconds.
        """
        assert self._marks is not None, "begin() comes first"
        self.mark("end")
        self._steps.append((self._marks, wait_s))
        self._marks = None

    def _looked_up(self, module: nn.Module, given: Any, vectors: dict[str, torch.Tensor]) -> None:
        if self._marks is None:
            return  # an evaluation
        self.mark("vectors")
        # Lookups were the first of the forward, so autograd reaches them last, and the last of them first: its gradient ends our own part.
        last = next((values for values in reversed(vectors.values()) if values.requires_grad), None)
        if last is not None:
            last.register_hook(lambda grad: self.mark("gradients"))  # type: ignore[no-untyped-call]

    def take(self) -> torch.Tensor:
        """Returns own, exchange and wait seconds of each step since the last call, float64 `[K, 3]`, K at most `MOST_STEPS`."""
        steps, self._steps = list(self._steps), deque(maxlen=MOST_STEPS)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = [(*self._split(marks), wait_s) for marks, wait_s in steps]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 3)

    def _split(self, marks: dict[str, Any]) -> tuple[float, float]:
        total = self._between(marks, "begin", "end")
        if self.alone:
            return total, 0.0
        own = self._between(marks, "vectors", "gradients") + self._between(marks, "backward", "end")
        return own, max(0.0, total - own)

    def _between(self, marks: dict[str, Any], first: str, last: str) -> float:
        start, stop = marks.get(first), marks.get(last)
        if start is None or stop is None:
            return 0.0  # a model without any lookup, or a lookup that nothing depends on
        return float(start.elapsed_time(stop)) / 1000.0 if self.device.type == "cuda" else float(stop - start)

    def close(self) -> None:
        """Takes the watch off the model."""
        if self._hook is not None:
            self._hook.remove()


@dataclass(frozen=True)
class RankTimes:
    """The same steps as timed by every rank.

    Attributes:
        own: seconds of each rank's own part, float64 `[W, K]`.
        exchange: seconds of its lookups, table updates and waiting for other ranks, float64 `[W, K]`.
        wait: seconds it waited for its batch, float64 `[W, K]`.
    """

    own: Floats
    exchange: Floats
    wait: Floats

    @classmethod
    def of(cls, gathered: torch.Tensor) -> RankTimes:
        """Returns the times out of every rank's `StepWatch.take()`, `[W, K, 3]`."""
        own, exchange, wait = (gathered[:, :, k].cpu().numpy() for k in range(3))
        return cls(own, exchange, wait)

    @property
    def busy(self) -> Floats:
        """Seconds that a rank made the others wait for: its own part and its wait for data, float64 `[W, K]`."""
        return self.own + self.wait

    @property
    def slowest(self) -> int:
        """The rank that was busy longest."""
        return int(self.busy.sum(1).argmax())

    def line(self) -> dict[str, Any]:
        """Returns the numbers for a line of metrics, seconds a step."""
        return {
            "rank_step_s": by_rank(self.own.mean(1)),
            "rank_exchange_s": by_rank(self.exchange.mean(1)),
            "rank_wait_s": by_rank(self.wait.mean(1)),
            "measured_imbalance": imbalance(self.own),
            "slowest_rank": self.slowest,
        }

    def remark(self) -> str:
        """Returns a few words on the slowest rank, or '' where the ranks are about equally fast."""
        share = imbalance(self.busy)
        if share <= 1.05:
            return ""
        waits = self.wait[self.slowest].sum() / max(1e-12, self.busy[self.slowest].sum())
        why = f", {waits:.0%} of it for its data" if waits > 0.2 else ""
        return f"rank {self.slowest} is slowest, {share:.2f}x the mean{why}"


class Tally:
    """Planned beside measured, over all lines of metrics that this process wrote."""

    def __init__(self) -> None:
        self._seconds, self._planned, self._num_lines = np.zeros(4), 0.0, 0

    def add(self, times: RankTimes, planned: float) -> None:
        """Adds the steps of one line.

        Args:
            times: of every rank.
            planned: imbalance of the step that the line is of.
        """
        own, exchange, wait = (part.mean(0).sum() for part in (times.own, times.exchange, times.wait))
        self._seconds += times.own.max(0).sum(), own, exchange, wait
        self._planned, self._num_lines = self._planned + planned, self._num_lines + 1

    def line(self) -> str:
        """Returns a line to read; '' before the first step."""
        if not self._num_lines:
            return ""
        slowest, own, exchange, wait = self._seconds
        whole = max(1e-12, own + exchange + wait)
        return (
            f"imbalance of the ranks planned {self._planned / self._num_lines:.4f} (cost), measured {slowest / max(1e-12, own):.4f} (own "
            f"seconds); of a step {own / whole:.1%} own, {exchange / whole:.1%} exchange and waiting for ranks, {wait / whole:.1%} for data"
        )


def imbalance(seconds: Floats) -> float:
    """Returns what the slowest rank of each step costs: the sum over steps of the largest over the sum of the mean; 1 is perfect.

    Args:
        seconds: of each rank and step, float64 `[W, K]`.
    """
    mean = float(seconds.mean(0).sum())
    return float(seconds.max(0).sum()) / mean if mean > 0 else 1.0


def by_rank(values: Any) -> Any:
    """Returns one number a rank as a list up to `MOST_RANKS`; beyond, `min`, `mean` and `max`.

    Args:
        values: one number a rank, `[W]`.
    """
    if len(values) <= MOST_RANKS:
        return [round(value, 6) for value in values.tolist()]
    numbers = {"min": values.min(), "mean": values.mean(), "max": values.max()}
    return {name: round(float(value), 6) for name, value in numbers.items()}


class Clock:
    """Times the steps since the last line of metrics.

    Args:
        loader: tells how long it was waited for.
        device: where this rank computes.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._noted = loader.wait_s
        self.restart()

    def restart(self) -> None:
        """Begins anew, after a line."""
        self.started, self.waited, self.tokens = time.perf_counter(), self.loader.wait_s, 0

    def count(self, batch: RaggedBatch) -> None:
        """Counts the history positions of a step, all ranks."""
        self.tokens += batch.num_tokens_global

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside, such as an evaluation."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def waited_s(self) -> float:
        """Returns the seconds waited for batches since the last call."""
        before, self._noted = self._noted, self.loader.wait_s
        return self._noted - before

    def tokens_per_s(self) -> float:
        """Returns the history positions a second, all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.tokens / max(1e-9, time.perf_counter() - self.started)

    def wait_share(self) -> float:
        """Returns which share of the time went by waiting for batches."""
        return (self.loader.wait_s - self.waited) / max(1e-9, time.perf_counter() - self.started)
