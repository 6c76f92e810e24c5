"""The planned epoch: which samples form each global step and which rank takes which, from the lengths alone.

Every rank computes the same plan without talking to the others, a pool at a time. See `plan_epoch`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distrag.batching.checks import as_lengths, as_samples, check_numbers
from distrag.batching.deal import NO_CAP
from distrag.batching.layout import Layout, build_layout, hash_lengths
from distrag.batching.pool import Rules, plan_pool

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from distrag.batching.compiled import Floats, Ints

Cost = tuple[float, float, float]

_KEPT = 3
"""Pools that a plan keeps: the one that is read, the one read ahead, and the one whose last step is still being logged."""


class _Pool(NamedTuple):
    samples: Ints
    ranks: Ints
    bounds: Ints


class EpochPlan:
    """The global steps of one epoch and the rank of every sample in them. Pools of steps are planned when they are first asked for.

    Attributes:
        world_size: ranks (`W`).
        seed: seed of the shuffle.
        epoch: number of the epoch.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`.
        num_samples: samples that are planned (`N`).
        num_tokens: their tokens.
        first_step: number of the first step; above 0 where the rest of an epoch is planned.
        num_steps: global steps in the epoch, the same number on every rank: the last step is `num_steps - 1`.
        fingerprint: hash of what every plan of the epoch follows from, whatever ranks and budget: lengths and seed.
    """

    def __init__(
        self,
        lengths: Ints,
        chosen: Ints | None,
        sizes: Ints,
        rules: Rules,
        layout: Layout,
        seed: int,
        epoch: int,
        first_step: int,
        fingerprint: str,
    ) -> None:
        self.world_size, self.seed, self.epoch, self.cost = rules.world_size, seed, epoch, rules.cost
        self.num_samples, self.num_tokens = len(lengths if chosen is None else chosen), layout.num_tokens
        self.first_step, self.num_steps, self.fingerprint = first_step, first_step + layout.num_steps, fingerprint
        self._lengths, self._chosen, self._rules, self._layout = lengths, chosen, rules, layout
        self._sizes = sizes
        self._pools: OrderedDict[int, _Pool] = OrderedDict()
        self._lock = threading.Lock()  # a loader's thread reads ahead while the training loop looks up what it logs

    def _pool(self, number: int) -> _Pool:
        with self._lock:
            if number not in self._pools:
                while len(self._pools) >= _KEPT:
                    self._pools.popitem(last=False)
                self._pools[number] = self._plan_pool(number)
            self._pools.move_to_end(number)
            return self._pools[number]

    def _plan_pool(self, number: int) -> _Pool:
        samples, sizes, state = self._layout.take(self._sizes, number)
        index, ranks, bounds, failed = plan_pool(sizes, self._rules, self._layout.steps_of(number), state, True)
        assert failed == -1, "the layout promised a pool that fits"
        samples = samples[index]
        return _Pool(samples if self._chosen is None else self._chosen[samples], ranks, bounds)

    def _span(self, step: int) -> tuple[_Pool, slice]:
        if not self.first_step <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of the steps from {self.first_step} to {self.num_steps - 1}")
        number, at = self._layout.find(step - self.first_step)
        pool = self._pool(number)
        return pool, slice(int(pool.bounds[at]), int(pool.bounds[at + 1]))

    def step_samples(self, step: int) -> Ints:
        """Returns the sample numbers of a global step over all ranks, int64; with `global_tokens` in an order of no world size."""
        pool, span = self._span(step)
        return pool.samples[span]

    def step_ranks(self, step: int) -> Ints:
        """Returns the rank of each of `step_samples`, int32."""
        pool, span = self._span(step)
        return pool.ranks[span]

    def samples(self, step: int, rank: int) -> Ints:
        """Returns the sample numbers of one rank in one step, int64; empty where the rank has to take a dummy."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a plan for {self.world_size} ranks")
        pool, span = self._span(step)
        if self.world_size == 1:
            return pool.samples[span]
        return np.compress(pool.ranks[span] == rank, pool.samples[span])

    def rank_tokens(self, step: int) -> Ints:
        """Returns the tokens of every rank in a step, int64 `[W]`."""
        tokens: Ints = self._per_rank(step, self._lengths[self.step_samples(step)]).astype(np.int64)
        return tokens

    def rank_samples(self, step: int) -> Ints:
        """Returns the number of samples of every rank in a step, int64 `[W]`."""
        return np.bincount(self.step_ranks(step), minlength=self.world_size)

    def rank_costs(self, step: int) -> Floats:
        """Returns the cost of every rank in a step, float64 `[W]`."""
        lengths = self._lengths[self.step_samples(step)].astype(np.float64)
        a, b, c = self.cost
        return self._per_rank(step, a * lengths + b * lengths * lengths + c)

    def _per_rank(self, step: int, values: Floats | Ints) -> Floats:
        return np.bincount(self.step_ranks(step), weights=values, minlength=self.world_size)

    def step_tokens(self, step: int) -> int:
        """Returns the tokens of a step over all ranks."""
        return int(self._lengths[self.step_samples(step)].sum())

    def step_sum(self, step: int, values: Floats | Ints) -> float:
        """Returns the sum of a per-sample quantity over a global step; with `global_tokens` the same bits at every world size.

        Args:
            step: number of the global step.
            values: one number per sample, `[N]`, such as the targets of each.
        """
        return float(np.asarray(values)[self.step_samples(step)].sum(dtype=np.float64))

    def imbalance(self, step: int) -> float:
        """Returns the cost of the dearest rank of a step over the mean of all ranks; 1 where nothing costs anything."""
        return _peak(self.rank_costs(step))

    def imbalances(self, max_steps: int | None = None) -> Floats:
        """Returns `imbalance` of every step, float64 `[num_steps]`, or of at most `max_steps` spread over the epoch."""
        return np.array([self.imbalance(step) for step in self._spread(max_steps)], np.float64)

    def _spread(self, max_steps: int | None) -> list[int]:
        if max_steps is None or self.num_steps - self.first_step <= max_steps:
            return list(range(self.first_step, self.num_steps))
        # Runs of neighbours: each pool that is planned gives several.
        run = max(1, min(16, max_steps))
        starts = np.linspace(self.first_step, self.num_steps - run, max(1, max_steps // run)).astype(np.int64)
        return sorted({int(start) + i for start in starts for i in range(run)})

    def summary(self, max_steps: int | None = None) -> dict[str, float]:
        """Returns the plan in numbers: steps, tokens and samples a rank and step, imbalances, dummies.

        Args:
            max_steps: look at so many steps at most, spread over the epoch; all otherwise, which plans every pool.
        """
        steps = self._spread(max_steps)
        found: dict[str, list[tuple[float, float, float]]] = {"step_tokens": [], "rank_tokens": [], "rank_samples": []}
        peaks: dict[str, list[float]] = {"imbalance": [], "token_imbalance": []}
        dummies = 0
        for step in steps:
            tokens, samples = self.rank_tokens(step), self.rank_samples(step)
            for name, values in (("step_tokens", tokens.sum(keepdims=True)), ("rank_tokens", tokens), ("rank_samples", samples)):
                found[name].append((values.min(), values.mean(), values.max()))
            peaks["imbalance"].append(self.imbalance(step))
            peaks["token_imbalance"].append(_peak(tokens))
            dummies += int((samples == 0).sum())  # a rank without samples takes a dummy
        numbers: dict[str, float] = {"num_steps": self.num_steps, "num_samples": self.num_samples, "num_tokens": self.num_tokens}
        for name, rows in found.items():
            low, mean, high = np.array(rows or [(0, 0, 0)], np.float64).T
            numbers |= {f"{name}_min": int(low.min()), f"{name}_mean": float(mean.mean()), f"{name}_max": int(high.max())}
        for name, its in peaks.items():
            some = np.array(its or [1.0])
            numbers |= {f"{name}_mean": float(some.mean()), f"{name}_p99": float(np.quantile(some, 0.99)), f"{name}_max": float(some.max())}
        return {**numbers, "num_dummies": dummies, "num_steps_looked_at": len(steps)}


def _peak(values: Floats | Ints) -> float:
    mean = values.mean()
    return float(values.max() / mean) if mean > 0 else 1.0


def plan_epoch(
    lengths: ArrayLike,
    *,
    world_size: int,
    max_tokens: int | None = None,
    global_tokens: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    cost: Cost = (1.0, 0.0, 0.0),
    max_samples: int | None = None,
    bucket_steps: int = 1,
    num_steps: int | None = None,
    samples: ArrayLike | None = None,
    first_step: int = 0,
    pool_samples: int = 1 << 17,
    fingerprint: str | None = None,
) -> EpochPlan:
    """Returns the plan of one epoch: each sample in exactly one step on exactly one rank, and equal steps on all ranks.

    Blocks of neighbours (single samples up to half a million of them, which is a permutation) are shuffled by `(seed, epoch)` and make
    pools of whole steps. Inside a pool samples are shuffled, and every step is a stratified draw of it: each sample is as likely in any
    step, and all steps have about the same lengths, tokens and cost, the last one too. All ranks of a step get about the same lengths as
    well. With `global_tokens` neither the steps nor the order of their samples depend on the world size; only the dealing does.

    Memory stays at a few pools and some bytes a block, whatever the number of samples; `lengths` is read in place.

    Args:
        lengths: tokens of each sample, integers `[N]`.
        world_size: ranks (`W`).
        max_tokens: most tokens of one rank in a step.
        global_tokens: most tokens of a global step, for every world size; a `max_tokens` beside it is only checked.
        seed: seed of the shuffle.
        epoch: number of the epoch; another epoch has another order.
        shuffle: false draws nothing: the same plan every epoch.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`.
        max_samples: most samples of one rank in a step; default `max_tokens`, so that empty histories do not pile up. With
            `global_tokens` a step holds at most `global_tokens` samples, and `max_samples` is only checked.
        bucket_steps: global steps that share one list sorted by length; 1 mixes all lengths in each step, more packs like lengths together.
        num_steps: make at least so many steps, but no more than there are samples.
        samples: plan these sample numbers only, integers; what earlier steps of the epoch have left, say.
        first_step: number of the first step.
        pool_samples: about how many samples are planned at once; twice as many where steps are large. Planning takes some 80 bytes each.
        fingerprint: that of the epoch, where it is known; otherwise all lengths are read for it.

    Raises:
        ValueError: for a budget that is missing, below 1 or below the longest sample, for negative lengths, and, with `global_tokens`, for
            a step that no dealing fits under `max_tokens` or `max_samples`.
    """
    numbers = {"max_tokens": max_tokens, "global_tokens": global_tokens, "max_samples": max_samples, "num_steps": num_steps}
    check_numbers(world_size, cost, seed, epoch, bucket_steps=bucket_steps, pool_samples=pool_samples, first_step=first_step, **numbers)
    sizes = as_lengths(lengths)
    chosen = None if samples is None else as_samples(samples, len(sizes))
    rules = _build_rules(world_size, max_tokens, global_tokens, max_samples, bucket_steps, cost)
    planned = sizes if chosen is None else sizes[chosen]
    layout = build_layout(planned, rules, seed, epoch, shuffle=shuffle, num_steps=num_steps or 0, pool_samples=pool_samples)
    if fingerprint is None:
        lengths_hash = layout.lengths_hash if chosen is None else hash_lengths(sizes)
        fingerprint = fingerprint_of(lengths_hash, len(sizes), seed, shuffle)
    return EpochPlan(sizes, chosen, planned, rules, layout, seed, epoch, first_step, fingerprint)


def _build_rules(
    world_size: int, max_tokens: int | None, global_tokens: int | None, max_samples: int | None, bucket_steps: int, cost: Cost
) -> Rules:
    price = (float(cost[0]), float(cost[1]), float(cost[2]))
    if global_tokens is not None:
        caps = (global_tokens, global_tokens, max_tokens or NO_CAP, max_samples or NO_CAP)
    else:
        assert max_tokens is not None
        caps = (NO_CAP, NO_CAP, max_tokens, max_samples or max_tokens)
    return Rules(world_size, bucket_steps, global_tokens is not None, *caps, price)


def fingerprint_of(lengths_hash: int, num_samples: int, seed: int, shuffle: bool) -> str:
    """Returns the hash of what every plan of an epoch follows from, whatever ranks and budget."""
    told = f"distrag plan 2: {lengths_hash} {num_samples} {seed} {shuffle}"
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
