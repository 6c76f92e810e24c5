"""Lengths that plans are measured on: drawn with a heavy tail, or those of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrag.batching.compiled import Ints

_CHUNK = 1_000_000


def _zipf(random: np.random.Generator, n: int) -> Ints:
    drawn: Ints = np.minimum(2 * np.minimum(random.zipf(1.2, n), _CHUNK), 8190)
    return drawn


def _lognormal(random: np.random.Generator, n: int) -> Ints:
    return np.clip(random.lognormal(5.5, 1.2, n), 1, 4096)


def _short(random: np.random.Generator, n: int) -> Ints:
    return np.clip(random.lognormal(2.7, 1.26, n), 1, 200)


DRAWN: dict[str, tuple[str, Callable[[np.random.Generator, int], Ints]]] = {
    "zipf": ("zipf(1.2) doubled, at most 8,190", _zipf),
    "lognormal": ("lognormal(5.5, 1.2), 1 to 4,096", _lognormal),
    "short": ("lognormal(2.7, 1.26), 1 to 200", _short),
}
"""What each kind of drawn lengths is, and how it is drawn."""


def draw_lengths(name: str, num_samples: int, seed: int = 0) -> Ints:
    """Returns lengths of one kind of `DRAWN`, int32 `[N]`; fewer of the same seed are their beginning, up to whole millions.

    Args:
        name: key of `DRAWN`.
        num_samples: how many (`N`).
        seed: of the generator.
    """
    draw, random = DRAWN[name][1], np.random.default_rng(seed)
    lengths = np.empty(num_samples, np.int32)
    for start in range(0, num_samples, _CHUNK):  # int64 and float64 of a hundred million would be gigabytes
        lengths[start : start + _CHUNK] = draw(random, min(_CHUNK, num_samples - start))
    return lengths


def read_lengths(path: str | Path) -> Ints:
    """Returns the events of every row of a store, int32 `[N]`."""
    from distrag.data.store import open_store

    return open_store(path).lengths.astype(np.int32)
