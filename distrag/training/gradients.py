"""Watches the size of gradients, room by room, and says what probably made them explode."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distrag.batch import RaggedBatch
from distrag.parallel import Parallel
from distrag.training.step import shared_key

WINDOW = 64
"""Steps that the usual size of the gradient is the median of."""
FACTOR = 20.0
"""A gradient so many times its usual size has exploded."""
_QUIET_STEPS = 100
_ENOUGH_STEPS = 16


class GradientWatch:
    """Tells a gradient that has exploded from the usual ones; every rank sees the same norms and says the same."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._quiet = 0

    def note(self, norm: float) -> float:
        """Returns how many times its usual size a norm is where that is worth a warning, else 0; warnings leave 100 steps between them."""
        usual = sorted(self._norms)[len(self._norms) // 2] if len(self._norms) >= _ENOUGH_STEPS else math.inf
        self._norms.append(norm)
        self._quiet -= 1
        if norm <= FACTOR * usual or usual == 0.0 or self._quiet > 0:
            return 0.0
        self._quiet = _QUIET_STEPS
        return norm / usual


def dense_norms(parallel: Parallel) -> dict[str, float]:
    """Returns the norm of the dense gradient of each room: mix, context, encoder, head, and each replicated table."""
    rooms: dict[str, list[torch.Tensor]] = {}
    for name, parameter in parallel.dense.items():
        if parameter.grad is not None:
            parts = name.split(".")
            rooms.setdefault(f"table {parts[3]}" if parts[0] == "tables" else parts[0], []).append(parameter.grad)
    return {room: float(torch.nn.utils.get_total_norm(gradients)) for room, gradients in rooms.items()}


def watched_keys(parallel: Parallel) -> list[str]:
    """Returns the sharded keys whose gradients have a norm that does not depend on the number of ranks.

    Negatives that all ranks share are looked up by each of them: only the sum of their gradients would have one.
    """
    shared = shared_key(parallel.plain)
    return [key for key in parallel.plain.tables.sharded_keys if key != shared]


def vector_squares(parallel: Parallel) -> torch.Tensor:
    """Returns the squared norm of this rank's gradients of the vectors of each watched key, in their order, float64 `[keys]`."""
    held = parallel.plain.tables.boundary.now.held
    squares = [held[key][1].grad.double().square().sum() for key in watched_keys(parallel)]  # type: ignore[union-attr]
    return torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Explosion:
    """What one rank knows of a gradient that has exploded: numbers, so that the next line of metrics brings them together.

    Attributes:
        times: how many times its usual size it is; 0 for none.
        step: global step of the epoch.
        squares: squared norm of this rank's gradients of looked-up vectors.
        largest: that of the sample with the largest one.
        sample: number of that sample.
        length: its events.
        longest: events of the longest history of the step.
        weightless: a sample of weight 0 whose vectors have a gradient, or -1.
    """

    times: float = 0.0
    step: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    sample: float = -1.0
    length: float = 0.0
    longest: float = 0.0
    weightless: float = -1.0


def find_outlier(parallel: Parallel, batch: RaggedBatch, times: float, longest: int) -> Explosion:
    """Returns what this rank knows of an exploded gradient, while the gradients of its vectors are held.

    Args:
        parallel: the sharded model.
        batch: this rank's share of the step.
        times: how many times its usual size the gradient is.
        longest: longest history of the step, over all ranks.
    """
    by_sample = torch.zeros(batch.num_samples, dtype=torch.float64, device=batch.samples.device)
    inputs: Any = parallel.plain.inputs
    for key, (_, leaf) in parallel.plain.tables.boundary.now.held.items():
        if leaf.grad is not None and (key in inputs.history_keys or key in inputs.context_keys):
            rows = torch.arange(batch.num_samples, device=by_sample.device).repeat_interleave(batch.ids[key].lengths())
            by_sample.index_add_(0, rows, leaf.grad.double().square().sum(1))
    top = int(by_sample.argmax())
    leaks = ((batch.weights == 0) & (by_sample > 0)).nonzero()[:, 0]
    weightless = int(batch.samples[leaks[0]]) if len(leaks) else -1
    sample, length = int(batch.samples[top]), int(batch.lengths[top])
    return Explosion(times, batch.step, float(by_sample.sum()), float(by_sample[top]), sample, length, longest, weightless)


def explain_explosion(ranks: Sequence[Explosion]) -> str:
    """Returns a warning with the likely cause of an exploded gradient; '' where no rank has seen one.

    Args:
        ranks: what each rank knows.
    """
    worst = max(ranks, key=lambda found: found.times)
    if worst.times <= 0:
        return ""
    what = f"step {worst.step:.0f}: the gradient is {worst.times:.0f} times its usual size"
    leak = next((found.weightless for found in ranks if found.weightless >= 0), -1)
    if leak >= 0:
        return f"{what}: sample {leak:.0f} weighs nothing and has a gradient; look for a position that encoder or loss forget to mask"
    total, top = sum(found.squares for found in ranks), max(ranks, key=lambda found: found.largest)
    if total > 0 and top.largest > 0.5 * total:
        of = f"{top.length:.0f} events{', the longest of the step' if top.length == top.longest else ''}"
        remedy = "lower data.max_len, set optim.clip_norm, or look at its values"
        return f"{what}, and sample {top.sample:.0f} ({of}) has {top.largest / total:.0%} of it; {remedy}"
    return (
        f"{what}, in many samples alike: the learning rate is probably too high; lower optim.lr, add optim.warmup_steps or optim.clip_norm"
    )
