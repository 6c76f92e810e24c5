"""The planned epoch as a torch sampler: this rank's sample numbers, step by step, and the state that continues it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

from distrag.batching.checks import as_lengths, check_state, check_steps_done
from distrag.batching.plan import Cost, EpochPlan, plan_epoch
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrag.batching.compiled import Ints


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
        dataset: what is sampled: an array of lengths `[N]`, or anything with `.lengths`, such as a View or a Store. One with `.at_epoch`
            is asked for the lengths of each epoch.
        max_tokens: most tokens of one rank in a step.
        global_tokens: budget of a global step, for every number of ranks; see `plan_epoch`.
        num_replicas: ranks; otherwise those of the process group, or 1 without one.
        rank: this rank; otherwise that in the process group, or 0 without one.
        shuffle: false draws nothing: the same plan in every epoch.
        seed: seed of the shuffle, the same on all ranks.
        max_samples: most samples of one rank in a step; otherwise `max_tokens`.
        bucket_steps: global steps that share one list sorted by length.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`, balanced over the ranks.
        counts: what each sample adds to the count of its loss, `[N]`, such as `collate.counts(view)`, or a function that gives it for the
            data set of an epoch; then the lists carry the count of their global step. It is NaN otherwise: nobody divides by a guess.
        content_hash: hash of the data, such as `store.content_hash`; goes into the state, and another one is refused.

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
        content_hash: str = "",
    ) -> None:
        self._source = dataset
        sized: Any = range(len(_lengths(dataset, 0)))  # what has lengths need not have a length
        try:
            super().__init__(sized, num_replicas, rank, shuffle, seed)
        except (RuntimeError, ValueError):
            # Only a missing process group is made up for; a rank outside the given ranks stays an error.
            if num_replicas is not None and rank is not None:
                raise
            super().__init__(sized, num_replicas or 1, rank or 0, shuffle, seed)
        self.dataset, self.total_size = dataset, len(sized)
        self._options: dict[str, Any] = {
            "world_size": self.num_replicas,
            "max_tokens": max_tokens,
            "global_tokens": global_tokens,
            "max_samples": max_samples,
            "bucket_steps": bucket_steps,
            "cost": tuple(float(part) for part in cost),
        }
        self._counts, self._content_hash = counts, content_hash
        self._start, self._stale = 0, False  # stale: the plan at hand is the rest of an epoch that is over
        self._before: list[dict[str, Any]] = []  # parts of this epoch that other ranks or budgets have trained
        self._plan = self._build_plan()

    def _build_plan(self) -> EpochPlan:
        self.lengths: Ints = _lengths(self._source, self.epoch)
        left = self._left()
        first = self._before[-1]["until"] if self._before else 0
        return self._plan_by(self._options, left, first)

    def _plan_by(self, options: dict[str, Any], samples: Ints | None, first_step: int) -> EpochPlan:
        return plan_epoch(
            self.lengths, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, samples=samples, first_step=first_step, **options
        )

    def _left(self) -> Ints | None:
        """Returns the samples that the parts before have left, int64, or None for all: from plans, not from a log."""
        left, first = None, 0
        for part in self._before:
            plan = self._plan_by(part["options"], left, first)
            used = np.zeros(len(self.lengths), np.bool_)
            for step in range(first, min(part["until"], plan.num_steps)):
                used[plan.step_samples(step)] = True
            left = np.flatnonzero(~used) if left is None else left[~used[left]]
            first = part["until"]
        return left

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch; made once an epoch, and once for all where nothing is drawn."""
        if self._plan.epoch != self.epoch and (self.shuffle or self._stale or hasattr(self._source, "at_epoch")):
            self._plan, self._stale = self._build_plan(), False
        return self._plan

    @property
    def num_samples(self) -> int:
        """Samples of this rank in what is left of the epoch; walks the plan."""
        if not hasattr(self, "_plan"):  # the parent class asks while it is made
            return self._equal_share
        return sum(len(self.plan.samples(step, self.rank)) for step in range(self._start, self.plan.num_steps))

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self._equal_share = value

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; another epoch starts at its first step and is whole."""
        if epoch != self.epoch:
            self._start, self._stale = 0, bool(self._before)
            self._before = []
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
        counts = self._counts(at_epoch(self._source, epoch)) if callable(self._counts) else self._counts
        for step in range(self._start, plan.num_steps):
            count = math.nan if counts is None else plan.step_sum(step, counts)
            yield StepSamples(plan.samples(step, self.rank).tolist(), step, epoch, count, plan.step_tokens(step))

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """Returns what continues the epoch, small and JSON-able: seed, epoch, steps done, fingerprints, and by which ranks and budget.

        Args:
            steps_done: steps of this epoch that were trained, not those that were read ahead.
        """
        check_steps_done(steps_done)
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "steps_done": steps_done,
            "fingerprint": self.plan.fingerprint,
            "content_hash": self._content_hash,
            "parts": [*self._before, {"options": self._options, "until": steps_done}],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue after `steps_done`, and after the end of an epoch with the next one.

        On the ranks and budget of the state the remaining steps come bit for bit; so they do on any number of ranks under the same
        `global_tokens`. On others the rest of the epoch is planned anew over exactly the samples that no step has used, and its steps are
        numbered on.

        Raises:
            ValueError: the state is of other data, naming both hashes, or no state.
        """
        check_state(state)
        self._check_data("The data is not that of the state", state["content_hash"], self._content_hash)
        kept = self.__dict__.copy()
        try:
            self._load(state)
        except ValueError:
            self.__dict__.update(kept)  # a refused state moves nothing
            raise

    def _load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._start, self._before = 0, []
        super().set_epoch(state["epoch"])
        done, parts = int(state["steps_done"]), [{**part, "options": _options(part["options"])} for part in state["parts"]]
        if _composes_alike(parts[-1]["options"], self._options):
            parts.pop()
        self._before = [part for part in parts if done]
        self._plan = self._build_plan()
        self._check_data("The lengths are not those of the state", state["fingerprint"], self._plan.fingerprint)
        if done > self._plan.num_steps and not self._before:
            todo = "pass what state_dict has given"
            got, wanted = f"{done} steps done", f"at most the {self._plan.num_steps} of the epoch"
            raise problem("More steps than the epoch has", got=got, wanted=wanted, where="load_state_dict", todo=todo)
        self._start = done
        if done >= self._plan.num_steps and len(self.lengths):
            self.set_epoch(state["epoch"] + 1)

    def _check_data(self, what: str, got: str, wanted: str) -> None:
        if got and wanted and got != wanted:
            todo = "resume on the data of the state, or start afresh: which samples were used cannot be told for other data"
            raise problem(what, got=f"hash {got} in the state", wanted=f"hash {wanted}, of the data at hand", where="resume", todo=todo)


def at_epoch(dataset: Any, epoch: int) -> Any:
    """Returns what a data set is in an epoch: itself, unless it draws its windows anew."""
    return dataset.at_epoch(epoch) if hasattr(dataset, "at_epoch") else dataset


def _lengths(dataset: Any, epoch: int) -> Ints:
    of_epoch = at_epoch(dataset, epoch)
    return as_lengths(getattr(of_epoch, "lengths", of_epoch))


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options as they were before JSON made lists of tuples."""
    return {**options, "cost": tuple(options["cost"])}


def _composes_alike(options: dict[str, Any], others: dict[str, Any]) -> bool:
    """Returns whether both make the same global steps: with a global budget neither ranks nor cost nor their caps have a say."""
    keys = ["global_tokens", "bucket_steps"]
    if options["global_tokens"] is None:
        keys += ["world_size", "max_tokens", "max_samples", "cost", "num_nodes"]
    return all(options.get(key) == others.get(key) for key in keys)
