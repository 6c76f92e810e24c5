"""The rank of each target among the whole catalogue, computed where the rows lie.

Scores are computed tile by tile, `[tile queries, tile rows]` at once. Queries are sorted by target first: then the tile that holds a target
is found without a search, a target's own score is read from the very matmul that scores its rivals, and all but one or two tiles of a block
of queries lie wholly below its targets (equal scores are better) or wholly above them (equal scores are worse).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.evaluate.catalogue import Catalogue, Ranks

Ints = NDArray[np.int64]

UNKNOWN, SEEN, NAN, NO_TARGET = -1, -2, -3, -4
"""In place of a rank: target is row 0; target is in the history; its score is NaN; the sample has no target. Only the last is no miss."""


@dataclass(frozen=True)
class Tile:
    """How many scores exist at once: `queries x rows` float32, twice.

    The shape is the same at every world size, so that BLAS adds in the same order; the default fits a core's cache, CUDA likes more.

    Args:
        queries: held-out samples scored at once.
        rows: rows of the item table scored at once.
    """

    queries: int = 512
    rows: int = 1024

    @classmethod
    def of(cls, device: torch.device) -> Tile:
        """Returns the size that suits the device."""
        return cls(4096, 8192) if device.type == "cuda" else cls()


def rank_targets(
    world: Ranks,
    catalogue: Catalogue,
    queries: torch.Tensor,
    counts: Sequence[int],
    targets: Ints,
    seen: Ints,
    seen_offsets: Ints,
    *,
    tile: Tile | None = None,
) -> Ints:
    """Returns the rank of each target among all unseen items, int64 `[Q]`, the same on every rank.

    rank = 1 + number of candidates that score better, or equal with a smaller item row. Row 0 and seen items are no candidates; neither
    is an item whose score is NaN. A collective: all ranks call it, those without queries or rows too.

    Args:
        world: the ranks.
        catalogue: this rank's rows of the item table.
        queries: float `[counts[rank], D]`, this rank's.
        counts: queries of each rank, `[W]`; they sum to `Q`.
        targets: int64 `[Q]` over all ranks, in rank order; 0 = unknown, -1 = none.
        seen: int64 `[S]`, seen item rows of all queries, flat, repeats allowed.
        seen_offsets: int64 `[Q+1]`.
        tile: scores computed at once.

    Returns:
        Ranks from 1; or `NO_TARGET`, `UNKNOWN`, `SEEN`, `NAN`, the first that holds.
    """
    if len(targets) == 0:
        return np.zeros(0, np.int64)
    with torch.no_grad(), _full_precision(world.device):
        gathered = torch.cat(world.all_gather_uneven(queries.detach().float().to(world.device), list(counts)))
        work = _Work(catalogue, gathered, targets, tile or Tile.of(world.device))
        scores = world.all_reduce_sum(work.score_targets())
        better = world.all_reduce_sum(work.count_better(scores, seen, seen_offsets))
    ranks = np.asarray(work.unsort(better) + 1, np.int64)
    owner = np.repeat(np.arange(len(targets)), np.diff(seen_offsets))
    ranks[work.unsort(scores.isnan())] = NAN
    ranks[owner[seen == targets[owner]]] = SEEN
    ranks[targets == 0] = UNKNOWN
    ranks[targets < 0] = NO_TARGET
    return ranks


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Computes matmuls in float32 whatever autocast or TF32 setting the training uses: rounded scores make false ties."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Work:
    """The queries of one flush, sorted by target and padded to whole blocks of `tile.queries`.

    Args:
        catalogue: this rank's rows.
        queries: float32 `[Q, D]` of all ranks.
        targets: int64 `[Q]`.
        tile: scores computed at once.
    """

    def __init__(self, catalogue: Catalogue, queries: torch.Tensor, targets: Ints, tile: Tile) -> None:
        self.catalogue, self.tile, device = catalogue, tile, queries.device
        self.order = np.argsort(targets, kind="stable")
        self.num_queries, self.num_blocks = len(targets), -(-len(targets) // tile.queries)
        spare = self.num_blocks * tile.queries - len(targets)
        order = torch.from_numpy(self.order).to(device)
        self.queries = torch.nn.functional.pad(queries[order], (0, 0, 0, spare))
        self.targets = np.pad(targets[self.order], (0, spare), mode="edge")
        self.targets_t = torch.from_numpy(self.targets).to(device)
        self.scores = torch.empty(tile.queries, tile.rows, device=device)
        self.flags = torch.empty_like(self.scores)

    def unsort(self, values: torch.Tensor) -> NDArray[Any]:
        """Returns padded, sorted values `[Q+spare]` as numpy `[Q]` in the order the queries came in."""
        host = values[: self.num_queries].cpu().numpy()
        out = np.empty_like(host)
        out[self.order] = host
        return out

    def _blocks(self) -> Iterator[tuple[int, slice, int, int]]:
        for block in range(self.num_blocks):
            span = slice(block * self.tile.queries, (block + 1) * self.tile.queries)
            yield block, span, int(self.targets[span.start]), int(self.targets[span.stop - 1])

    def _score(self, span: slice, rows: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.queries[span], rows.t(), out=self.scores)

    def score_targets(self) -> torch.Tensor:
        """Returns each target's score, float32 `[Q+spare]`; 0 where another rank holds the row."""
        own = torch.zeros(len(self.targets), device=self.queries.device)
        for lo, n, rows in self.catalogue.tiles(self.tile.rows):
            for _, span, smallest, largest in self._blocks():
                if smallest < lo + n and largest >= lo:
                    column = self.targets_t[span] - lo
                    inside = (column >= 0) & (column < n)
                    found = self._score(span, rows).gather(1, column.clamp(0, n - 1)[:, None])[:, 0]
                    own[span] = torch.where(inside, found, own[span])
        return own

    def count_better(self, target_scores: torch.Tensor, seen: Ints, seen_offsets: Ints) -> torch.Tensor:
        """Returns how many candidates of this rank's rows rank before each target, int64 `[Q+spare]`."""
        better = torch.zeros(len(self.targets), dtype=torch.int64, device=self.queries.device)
        cells, bounds = self._masked_cells(seen, seen_offsets)
        for t, (lo, n, rows) in enumerate(self.catalogue.tiles(self.tile.rows)):
            for block, span, smallest, largest in self._blocks():
                scores = self._score(span, rows)
                a, b = bounds[t * self.num_blocks + block : t * self.num_blocks + block + 2]
                # NaN compares false with everything: a masked cell is neither better nor equal.
                scores.view(-1).index_fill_(0, cells[a:b], torch.nan)
                if lo == 0:
                    scores[:, 0] = torch.nan
                flags, own = self.flags[:, :n], target_scores[span, None]
                # Float flags: their sum is exact below 2**24 and several times cheaper than the sum of booleans.
                if lo + n <= smallest:
                    better[span] += torch.ge(scores[:, :n], own, out=flags).sum(1).long()
                    continue
                better[span] += torch.gt(scores[:, :n], own, out=flags).sum(1).long()
                if lo <= largest:
                    smaller = torch.arange(lo, lo + n, device=scores.device) < self.targets_t[span, None]
                    better[span] += torch.eq(scores[:, :n], own, out=flags).mul_(smaller).sum(1).long()
        return better

    def _masked_cells(self, seen: Ints, seen_offsets: Ints) -> tuple[torch.Tensor, list[int]]:
        """Returns the cells of the tiles that are no rivals: seen items, and the target itself.

        Returns:
            Flat cell numbers int64 `[M]` within their `[queries, rows]` tile, and bounds: cells of tile t and block b are
            `bounds[t * num_blocks + b]` to the next bound.
        """
        place = np.empty(self.num_queries, np.int64)
        place[self.order] = np.arange(self.num_queries)
        query = np.concatenate([np.repeat(place, np.diff(seen_offsets)), np.arange(self.num_queries)])
        item = np.concatenate([seen, self.targets[: self.num_queries]])
        starts, ends = self.catalogue.tile_bounds(self.tile.rows)
        tile = np.searchsorted(starts, item, side="right") - 1
        held = tile >= 0
        held[held] = item[held] < ends[tile[held]]
        query, item, tile = query[held], item[held], tile[held]
        group = tile * self.num_blocks + query // self.tile.queries
        order = np.argsort(group, kind="stable")
        cells = ((query % self.tile.queries) * self.tile.rows + item - starts[tile])[order]
        bounds = np.searchsorted(group[order], np.arange(len(starts) * self.num_blocks + 1))
        return torch.from_numpy(cells).to(self.queries.device), bounds.tolist()
