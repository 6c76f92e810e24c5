"""Interleaved laps: every side runs a while, in turn, round after round, so that a busy machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np


class Side(Protocol):
    """One way of doing the same work."""

    def step(self) -> int:
        """Does one step; returns its valid tokens."""


@dataclass(frozen=True)
class Lap:
    """What one side did in one round.

    Attributes:
        steps: steps done.
        tokens: valid tokens in them.
        cpu_s: CPU seconds of the process, all threads and the system's work for it included.
        wall_s: seconds on the wall.
    """

    steps: int
    tokens: int
    cpu_s: float
    wall_s: float


def run_lap(side: Side, seconds: float, min_steps: int = 2) -> Lap:
    """Returns the lap of a side that steps until `seconds` of wall time have passed."""
    steps = tokens = 0
    cpu, wall = time.process_time(), time.perf_counter()
    while steps < min_steps or time.perf_counter() - wall < seconds:
        tokens += side.step()
        steps += 1
    return Lap(steps, tokens, time.process_time() - cpu, time.perf_counter() - wall)


def run_rounds(sides: Mapping[str, Side], rounds: int, seconds: float) -> dict[str, list[Lap]]:
    """Returns the laps of every side; one lap of each before them is thrown away, for what is compiled or allocated at first use.

    Args:
        sides: by name.
        rounds: laps of each side.
        seconds: least length of a lap.
    """
    names = list(sides)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for side in sides.values():
        run_lap(side, seconds / 2)
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            laps[name].append(run_lap(sides[name], seconds))
    return laps


def tokens_per_s(laps: list[Lap], *, wall: bool = False) -> float:
    """Returns the median over laps of valid tokens a CPU second, or a second on the wall."""
    return median(lap.tokens / max(1e-9, lap.wall_s if wall else lap.cpu_s) for lap in laps)


def step_s(laps: list[Lap]) -> float:
    """Returns the median CPU seconds of a step."""
    return median(lap.cpu_s / lap.steps for lap in laps)


@dataclass(frozen=True)
class Ratio:
    """How many times faster one side is.

    Attributes:
        value: ratio of the medians, by CPU time.
        low: first quartile of the ratios of the rounds.
        high: third quartile.
        wall: ratio of the medians, by wall time.
    """

    value: float
    low: float
    high: float
    wall: float


def compare(fast: list[Lap], slow: list[Lap]) -> Ratio:
    """Returns how many times more tokens a second `fast` does than `slow`."""
    rounds = [tokens_per_s([a]) / tokens_per_s([b]) for a, b in zip(fast, slow, strict=True)]
    low, high = np.quantile(rounds, [0.25, 0.75]).tolist()
    wall = tokens_per_s(fast, wall=True) / tokens_per_s(slow, wall=True)
    return Ratio(tokens_per_s(fast) / tokens_per_s(slow), low, high, wall)
