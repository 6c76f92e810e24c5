"""An epoch of torch's own DistributedSampler, in the shape that distrag's loader reads: equal counts a rank, lengths as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    from distrag.batching.compiled import Floats, Ints
    from distrag.batching.plan import Cost


class PlainPlan:
    """What every rank reads in one epoch.

    Args:
        dealt: sample numbers of each rank, as many for all.
        lengths: tokens of each sample, `[N]`.
        batch_size: samples of a rank in a step.
        epoch: number of the epoch.
    """

    def __init__(self, dealt: Ints, lengths: Ints, batch_size: int, epoch: int) -> None:
        self.dealt, self.lengths, self.batch_size, self.epoch = dealt, lengths, batch_size, epoch
        self.num_steps: int = -(-dealt.shape[1] // batch_size)

    def samples(self, step: int, rank: int) -> Ints:
        """Returns the sample numbers of one rank in one step, int64."""
        own: Ints = self.dealt[rank, step * self.batch_size : (step + 1) * self.batch_size]
        return own

    def _all(self, step: int) -> Ints:
        everyone: Ints = self.dealt[:, step * self.batch_size : (step + 1) * self.batch_size]
        return everyone

    def rank_costs(self, step: int, cost: Cost) -> Floats:
        """Returns the cost of every rank in a step, float64 `[W]`."""
        own = self.lengths[self._all(step)].astype(np.float64)
        costs: Floats = (cost[0] * own + cost[1] * own * own + cost[2]).sum(1)
        return costs

    def step_tokens(self, step: int) -> int:
        """Returns the tokens of a step over all ranks."""
        return int(self.lengths[self._all(step)].sum())

    def step_sum(self, step: int, values: Floats) -> float:
        """Returns the sum of a per-sample quantity over a global step."""
        return float(np.asarray(values)[self._all(step)].sum(dtype=np.float64))


class PlainSampler:
    """Plans of `DistributedSampler(shuffle=True)` for every epoch.

    Args:
        lengths: tokens of each sample, `[N]`.
        world_size: ranks (`W`).
        rank: this rank.
        batch_size: samples of a rank in a step.
        seed: seed of the shuffle.
    """

    start = 0
    plan: PlainPlan

    def __init__(self, lengths: Ints, *, world_size: int, rank: int, batch_size: int, seed: int = 0) -> None:
        self.lengths, self.rank, self.batch_size = lengths, rank, batch_size
        numbers: Any = range(len(lengths))
        self._dealers = [DistributedSampler[int](numbers, world_size, r, seed=seed) for r in range(world_size)]
        self.set_epoch(0)

    def __len__(self) -> int:
        """Steps of the epoch."""
        return self.plan.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Shuffles for another epoch."""
        for dealer in self._dealers:
            dealer.set_epoch(epoch)
        self.plan = PlainPlan(np.array([list(dealer) for dealer in self._dealers]), self.lengths, self.batch_size, epoch)
