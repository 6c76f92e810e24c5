"""The histories that both sides of the bench train on: drawn with a long tail, or taken from a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distrag.problem import problem

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_SIGMA = np.log(120 / 15) / 1.6449  # median 15 and 95th percentile 120


@dataclass(frozen=True)
class BenchData:
    """Labelled histories of one id feature.

    Attributes:
        items: int64 `[num_positions]`, table rows, one history after the other.
        offsets: int64 `[N+1]`, where each history starts.
        labels: float32 `[N]`, 0 or 1.
        num_rows: rows of the item table, the unknown row 0 included.
        source: where they came from, for the report.
    """

    items: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.float32]
    num_rows: int
    source: str

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of each history, int64 `[N]`."""
        return np.diff(self.offsets)


def draw_histories(num_samples: int, num_items: int, max_len: int = 200, seed: int = 0) -> BenchData:
    """Returns histories whose lengths are lognormal (median 15, 95th percentile 120, from 1 to `max_len`).

    The r-th most popular item occurs in proportion to 1 / (r + 10); which row that is, is random, so popular rows are no neighbours in
    memory.
    """
    random = np.random.default_rng(seed)
    lengths = np.clip(np.rint(random.lognormal(np.log(15), _SIGMA, num_samples)), 1, max_len).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    share = np.cumsum(1.0 / (np.arange(num_items) + 10))
    rank = np.searchsorted(share / share[-1], random.random(int(offsets[-1])))
    items = (1 + random.permutation(num_items))[np.minimum(rank, num_items - 1)]
    labels = (random.random(num_samples) < 0.3).astype(np.float32)
    return BenchData(items, offsets, labels, num_items + 1, "synthetic")


def read_histories(path: str | Path, num_samples: int, max_len: int) -> BenchData:
    """Returns the newest `max_len` events of the first `num_samples` rows of a store, as its first id feature has them.

    A store without labels gets zeros: what is learnt costs nothing.

    Raises:
        ValueError: the store has no per-position id, or no event.
    """
    from distrag.data.store import open_store

    store = open_store(path)
    feature = next((f for f in store.schema.history if f.kind == "id" and f.table is not None), None)
    if feature is None or feature.table is None or store.num_positions == 0:
        got = [f.name for f in store.schema.history]
        raise problem("Nothing to look up", got=got, wanted="an id per position", where=path, todo="name a store of item histories")
    stops = store.offsets[1 : num_samples + 1]
    lengths = np.minimum(stops - store.offsets[: len(stops)], max_len)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    at = np.arange(offsets[-1]) + np.repeat(stops - offsets[1:], lengths)
    labels = np.zeros(len(stops), np.float32) if store.label is None else store.label[: len(stops)].copy()
    items = store.position(feature.name)[at].astype(np.int64)
    return BenchData(items, offsets, labels, store.schema.table(feature.table).num_rows, str(path))
