"""The planned epoch as a torch sampler: this rank's sample numbers, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

from distrag.batching.plan import Cost, EpochPlan, plan_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator


class StepSamples(list[int]):
    """The sample numbers of one rank in one step, with the step and epoch they belong to; survives the way to a worker process."""

    def __init__(
        self, samples: Any = (), step: int = 0, epoch: int = 0, global_count: float = math.nan, num_tokens_global: int = 0
    ) -> None:
        super().__init__(samples)
        self.step, self.epoch, self.global_count, self.num_tokens_global = step, epoch, global_count, num_tokens_global

    def __reduce__(self) -> tuple[Any, ...]:
        return StepSamples, (list(self), self.step, self.epoch, self.global_count, self.num_tokens_global)


class TokenBudgetSampler(DistributedSampler[list[int]]):
    """Yields one list of sample numbers a step under a token budget, for `DataLoader(..., batch_sampler=)` or distrag's own loader.

    All ranks yield the same number of lists and together every sample once an epoch; a list may be empty, and the rank then takes a dummy.
    As with any DistributedSampler the epoch changes by `set_epoch` alone: iterating twice gives the same epoch twice. distrag's training
    calls it; a loop of your own has to.

    Args:
        dataset: what is sampled: an array of lengths `[N]`, or anything with `.lengths`, such as a View or a Store.
        max_tokens: most tokens of one rank in a step.
        global_tokens: budget of a global step, for every number of ranks; see `plan_epoch`.
        num_replicas: ranks; otherwise those of the process group, or 1 without one.
        rank: this rank; otherwise that in the process group, or 0 without one.
        shuffle: false keeps the samples in order.
        seed: seed of the shuffle, the same on all ranks.
        max_samples: most samples of one rank in a step; otherwise `max_tokens`.
        bucket_steps: global steps that share one pool sorted by length.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`, balanced over the ranks.
        counts: what each sample adds to the count of its loss, `[N]`, such as `collate.counts(view)`; then the lists carry the count of
            their global step. It is NaN otherwise, so that nobody divides by a guess.

    Raises:
        ValueError: for a rank outside the ranks, or a budget that does not fit the lengths.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        max_tokens: int | None = None,
        global_tokens: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_samples: int | None = None,
        bucket_steps: int = 1,
        cost: Cost = (1.0, 0.0, 0.0),
        counts: Any = None,
    ) -> None:
        self.lengths = np.ascontiguousarray(getattr(dataset, "lengths", dataset), np.int64)
        sized: Any = self.lengths  # what has lengths need not have a length
        try:
            super().__init__(sized, num_replicas, rank, shuffle, seed)
        except (RuntimeError, ValueError):
            # Only a missing process group is made up for; a rank outside the given ranks stays an error.
            if num_replicas is not None and rank is not None:
                raise
            super().__init__(sized, num_replicas or 1, rank or 0, shuffle, seed)
        self.dataset, self.total_size = dataset, len(self.lengths)
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "global_tokens": global_tokens,
            "max_samples": max_samples,
            "bucket_steps": bucket_steps,
            "cost": cost,
        }
        self._counts = None if counts is None else np.asarray(counts, np.float64)
        self._start = 0
        self._plan = self._build_plan()

    def _build_plan(self) -> EpochPlan:
        plan = plan_epoch(
            self.lengths, world_size=self.num_replicas, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, **self._options
        )
        self.num_samples = plan.num_samples_of(self.rank)
        return plan

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch; made once an epoch, and once for all where nothing is shuffled."""
        if self.shuffle and self._plan.epoch != self.epoch:
            self._plan = self._build_plan()
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; another epoch starts at its first step."""
        if epoch != self.epoch:
            self._start = 0
        super().set_epoch(epoch)

    @property
    def start(self) -> int:
        """The first step that iterating yields; above 0 only after `load_state_dict`."""
        return self._start

    def __len__(self) -> int:
        """Lists that iterating yields: the steps of the epoch that are left."""
        return self.plan.num_steps - self._start

    def __iter__(self) -> Iterator[list[int]]:
        plan, epoch = self.plan, self.epoch
        tokens = plan.step_sums(self.lengths)
        counts = np.full(plan.num_steps, np.nan) if self._counts is None else plan.step_sums(self._counts)
        for step in range(self._start, plan.num_steps):
            samples = plan.samples(step, self.rank).tolist()
            yield StepSamples(samples, step, epoch, float(counts[step]), int(tokens[step]))

    def state_dict(self, steps_done: int) -> dict[str, int]:
        """Returns what resumes the epoch: the seed, the epoch and the steps that were trained, not those that were read ahead."""
        return {"seed": self.seed, "epoch": self.epoch, "steps_done": steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next iteration continue after `steps_done`; at the end of an epoch nothing is left until `set_epoch`."""
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._plan = self._build_plan()
        self._start = min(state["steps_done"], self._plan.num_steps)
