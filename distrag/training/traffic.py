"""Bytes that a rank sends in a step: the exchange of sharded tables, and the all-reduce of everything that is replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrag.embedding.config import TableSpec
from distrag.embedding.plan import Placement

_ID, _FLOAT = 8, 4  # bytes of an int64 id or length, of a float32 value

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends to other ranks in one step, float64 `[W]` each.

    Attributes:
        ids: ids and lengths, on their way to the ranks that hold the rows.
        vectors: rows, on their way back (forward).
        gradients: gradients of these rows, on their way to the tables (backward).
        reduced: of the all-reduce of dense parameters and replicated tables.
    """

    ids: Floats
    vectors: Floats
    gradients: Floats
    reduced: Floats

    def total(self) -> Floats:
        """Returns the bytes of each rank, float64 `[W]`."""
        return self.ids + self.vectors + self.gradients + self.reduced


def expect_traffic(
    specs: Sequence[TableSpec],
    placements: Sequence[Placement],
    ids_per_key: Mapping[str, float],
    samples: float,
    num_dense: int,
    world_size: int,
) -> Traffic:
    """Returns what each of `W` ranks sends in a step in which every rank holds the same numbers of ids and samples.

    With n ids of a rank for all keys of a table, B samples, k keys, width D:

    - row_wise: a rank sends `n * 8 * (W-1)/W` bytes of ids (rows lie evenly), `B * k * 8 * (W-1)` of lengths, since each rank is told the
      lengths of its part, and `n * D * 4 * (W-1)/W` of vectors for others and as much of gradients.
    - table_wise: a rank that does not hold the table sends all `n * 8` bytes of ids, `B * k * 8` of lengths and `n * D * 4` of gradients;
      the one that does sends `(W-1) * n * D * 4` bytes of vectors.
    - column_wise: each rank sends its ids and lengths to all others, `(W-1) * (n + B * k) * 8`, and a W-th of every vector,
      `(W-1) * n * D/W * 4`, and as much of gradients.
    - replicated tables and dense parameters: a ring all-reduce of all gradients, `2 * (W-1)/W * 4` bytes a parameter; the gradient of a
      replicated table is dense, so its size does not depend on the batch.

    Sizes that the exchange announces first (a few hundred bytes) are left out. One rank sends nothing.

    Args:
        specs: the tables with their keys.
        placements: from `build_placements`.
        ids_per_key: ids of a rank in a step for each key.
        samples: samples of a rank in a step.
        num_dense: parameters outside of tables.
        world_size: `W`.
    """
    W = world_size
    keys = {spec.name: spec.keys for spec in specs}
    ids, vectors, gradients, reduced = (np.zeros(W) for _ in range(4))
    share = (W - 1) / W
    reduced += 2 * share * num_dense * _FLOAT
    for placement in placements:
        its, row = keys[placement.table], placement.dim * _FLOAT
        n, lengths = sum(ids_per_key[key] for key in its), samples * len(its) * _ID
        if placement.sharding == "replicated":
            reduced += 2 * share * placement.num_rows * row
        elif placement.sharding == "row_wise":
            ids += share * n * _ID + (W - 1) * lengths
            vectors += share * n * row
            gradients += share * n * row
        elif placement.sharding == "column_wise":
            ids += (W - 1) * (n * _ID + lengths)
            vectors += share * n * row
            gradients += share * n * row
        else:
            (owner,) = placement.ranks
            others = np.arange(W) != owner
            ids += others * (n * _ID + lengths)
            gradients += others * n * row
            vectors[owner] += (W - 1) * n * row
    return Traffic(ids, vectors, gradients, reduced)
