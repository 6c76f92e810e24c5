"""HR, NDCG and MRR of held-out items, ranked among the whole catalogue without the items their users have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.evaluate.catalogue import Catalogue, Ranks
from distrag.evaluate.scoring import NAN, NO_TARGET, SEEN, UNKNOWN, Ints, Tile, rank_targets

if TYPE_CHECKING:
    from distrag.data.split import View

_NOT_RANKED = NO_TARGET - 1


@dataclass(frozen=True)
class HeldOut:
    """The held-out target of every sample and what its user has seen before.

    Attributes:
        targets: int64 `[N]`, item rows; 0 = unknown, -1 = the sample has no target.
        items: `[num_positions]`, the store's item rows, any integer type.
        first: int64 `[N]`.
        end: int64 `[N]`; `items[first:end]` are the seen items, all before the target, not the truncated history alone.
        apart: whether a rank can read targets and items only of samples that it may be given; it then asks the other ranks for theirs.
    """

    targets: Ints
    items: NDArray[np.integer]
    first: Ints
    end: Ints
    apart: bool = False

    @classmethod
    def of(cls, view: View, items: NDArray[np.integer], own: NDArray[np.bool_] | None = None) -> HeldOut:
        """Returns targets and seen items of a view.

        Args:
            view: the samples' windows.
            items: `store.position(target)`.
            own: bool `[N]`, samples that this rank can read; None where it can read all.
        """
        targets = np.full(len(view.next), -1, np.int64)
        held = view.next >= 0 if own is None else (view.next >= 0) & own
        targets[held] = items[view.next[held]]
        return cls(targets, items, view.first, view.seen_end, apart=own is not None)

    def take(self, world: Ranks, per_rank: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
        """Returns the targets of the samples of all ranks, in rank order, their seen items, flat, and the offsets of these.

        A collective where the ranks hold them apart: how much each one sends follows from what all know.

        Args:
            world: the ranks.
            per_rank: sample numbers of every rank.
        """
        samples = np.concatenate(per_rank)
        if not self.apart:
            return self.targets[samples], *self.take_seen(samples)
        mine = per_rank[world.rank]
        lengths = [self.end[own] - self.first[own] for own in per_rank]
        targets = _exchange(world, self.targets[mine], [len(own) for own in per_rank])
        seen = _exchange(world, self.take_seen(mine)[0], [int(own.sum()) for own in lengths])
        return targets, seen, np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)

    def take_seen(self, samples: Ints) -> tuple[Ints, Ints]:
        """Returns seen item rows int64 `[S]` of some samples, flat, and their offsets int64 `[len(samples)+1]`."""
        lengths = self.end[samples] - self.first[samples]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        positions = np.repeat(self.first[samples] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return self.items[positions].astype(np.int64), offsets


class RankingEvaluator:
    """Ranks step by step and gives the metrics of all samples in sample order, so that they do not depend on the world size.

    Query vectors travel (one all-gather a flush), then one float and one integer a query; the table stays where it lies.

    Args:
        world: the ranks.
        catalogue: this rank's rows of the item table.
        held_out: targets and seen items of all `N` samples.
        ks: cut-offs of the metrics.
        tile: scores computed at once.
        flush_at: queries of all ranks that are collected before they are ranked together.
    """

    def __init__(
        self,
        world: Ranks,
        catalogue: Catalogue,
        held_out: HeldOut,
        ks: Sequence[int] = (5, 10, 20),
        *,
        tile: Tile | None = None,
        flush_at: int = 16384,
    ) -> None:
        self.world, self.catalogue, self.held_out, self.ks = world, catalogue, held_out, tuple(ks)
        self.tile, self.flush_at = tile or Tile.of(world.device), flush_at
        self.ranks = np.full(len(held_out.targets), _NOT_RANKED, np.int64)
        self._queries: list[torch.Tensor] = []
        self._samples: list[list[Ints]] = [[] for _ in range(world.size)]
        self._num_pending = 0

    def add(self, queries: torch.Tensor, samples: Sequence[Ints]) -> None:
        """Takes this rank's query vectors of one global step. All ranks call it equally often.

        Args:
            queries: `[len(samples[rank]), D]`, without dummies; a rank without samples gives `[0, D]`.
            samples: sample numbers of *every* rank, known from the plan.
        """
        assert queries.shape == (len(samples[self.world.rank]), self.catalogue.dim), "one query vector per sample of this rank"
        self._queries.append(queries.detach().float())
        for mine, new in zip(self._samples, samples, strict=True):
            mine.append(np.asarray(new, np.int64))
        self._num_pending += sum(len(new) for new in samples)
        # Every rank knows every rank's samples, so all flush at the same call.
        if self._num_pending >= self.flush_at:
            self._flush()

    def _flush(self) -> None:
        if self._num_pending == 0:
            return
        per_rank = [np.concatenate(own) for own in self._samples]
        samples = np.concatenate(per_rank)
        targets, seen, offsets = self.held_out.take(self.world, per_rank)
        counts = [len(own) for own in per_rank]
        queries = torch.cat(self._queries)
        self.ranks[samples] = rank_targets(self.world, self.catalogue, queries, counts, targets, seen, offsets, tile=self.tile)
        self._queries, self._samples, self._num_pending = [], [[] for _ in per_rank], 0

    def result(self) -> dict[str, int | float]:
        """Returns the metrics of `ranking_metrics` over all samples added, and `num_nonfinite_items`. A collective."""
        self._flush()
        return {**ranking_metrics(self.ranks, self.ks), "num_nonfinite_items": self.catalogue.num_nonfinite_items}


def _exchange(world: Ranks, values: Ints, sizes: list[int]) -> Ints:
    """Returns the values of all ranks in rank order; rank r gives `sizes[r]` of them."""
    if not sum(sizes):
        return values
    parts = world.all_gather_uneven(torch.from_numpy(values).to(world.device), sizes)
    return torch.cat(parts).cpu().numpy()


def ranking_metrics(ranks: Ints, ks: Sequence[int]) -> dict[str, int | float]:
    """Returns `users`, `hr@k`, `ndcg@k`, `mrr@k`, `num_seen_targets`, `num_unknown`, `num_nan`.

    One relevant item a user; a miss counts in `users`; means are 0 without users. Summed in float64 in the order given.

    Args:
        ranks: int64 `[N]` in sample order, ranks from 1, or one of the codes of this module.
        ks: cut-offs.
    """
    used = ranks[ranks > NO_TARGET]
    place = np.where(used > 0, used, np.iinfo(np.int64).max)
    out: dict[str, int | float] = {"users": len(used)}
    for k in ks:
        top = np.where(place <= k, place, 0).astype(np.float64)
        hit, users = top > 0, max(len(used), 1)
        out[f"hr@{k}"] = float(hit.sum() / users)
        out[f"ndcg@{k}"] = float((hit / np.log2(np.where(hit, top, 1.0) + 1.0)).sum() / users)
        out[f"mrr@{k}"] = float((hit / np.where(hit, top, 1.0)).sum() / users)
    codes = {"num_seen_targets": SEEN, "num_unknown": UNKNOWN, "num_nan": NAN}
    return out | {name: int((used == code).sum()) for name, code in codes.items()}
