"""The planned epoch: which samples form each global step and which rank takes which, from the lengths alone.

Every rank computes the same plan without talking to the others. See `plan_epoch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.cut import sort_pools, walk
from distrag.batching.deal import NO_CAP, step_imbalances
from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from distrag.batching.compiled import Floats, Ints

Cost = tuple[float, float, float]


@dataclass(frozen=True)
class EpochPlan:
    """The global steps of one epoch and the rank of every sample in them.

    Attributes:
        world_size: ranks (`W`).
        seed: seed of the shuffle.
        epoch: number of the epoch.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`.
        num_samples: samples in the epoch (`N`).
        num_tokens: tokens in the epoch.
    """

    world_size: int
    seed: int
    epoch: int
    cost: Cost
    num_samples: int
    num_tokens: int
    _lengths: Ints = field(repr=False)
    _samples: Ints = field(repr=False)
    _ranks: Ints = field(repr=False)
    _bounds: Ints = field(repr=False)
    _turn: Ints = field(repr=False)

    @property
    def num_steps(self) -> int:
        """Global steps in the epoch, the same number on every rank."""
        return len(self._turn)

    def _span(self, step: int) -> slice:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan with {self.num_steps} steps")
        at = self._turn[step]
        return slice(int(self._bounds[at]), int(self._bounds[at + 1]))

    def step_samples(self, step: int) -> Ints:
        """Returns the sample numbers of a global step over all ranks, int64, in an order that no world size changes."""
        return self._samples[self._span(step)]

    def samples(self, step: int, rank: int) -> Ints:
        """Returns the sample numbers of one rank in one step, int64; empty where the rank has to take a dummy."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a plan for {self.world_size} ranks")
        span = self._span(step)
        if self.world_size == 1:
            return self._samples[span]
        return np.compress(self._ranks[span] == rank, self._samples[span])

    def num_samples_of(self, rank: int) -> int:
        """Returns the samples of one rank over the epoch."""
        return int(np.count_nonzero(self._ranks == rank))

    def rank_tokens(self, step: int) -> Ints:
        """Returns the tokens of every rank in a step, int64 `[W]`."""
        tokens: Ints = self._per_rank(step, self._lengths[self.step_samples(step)]).astype(np.int64)
        return tokens

    def rank_samples(self, step: int) -> Ints:
        """Returns the number of samples of every rank in a step, int64 `[W]`."""
        return np.bincount(self._ranks[self._span(step)], minlength=self.world_size)

    def rank_costs(self, step: int) -> Floats:
        """Returns the cost of every rank in a step, float64 `[W]`."""
        lengths = self._lengths[self.step_samples(step)].astype(np.float64)
        a, b, c = self.cost
        return self._per_rank(step, a * lengths + b * lengths * lengths + c)

    def _per_rank(self, step: int, values: Floats | Ints) -> Floats:
        return np.bincount(self._ranks[self._span(step)], weights=values, minlength=self.world_size)

    def tokens(self, step: int, rank: int) -> int:
        """Returns the tokens of one rank in one step."""
        return int(self._lengths[self.samples(step, rank)].sum())

    def step_tokens(self, step: int) -> int:
        """Returns the tokens of a step over all ranks."""
        return int(self._lengths[self.step_samples(step)].sum())

    def imbalance(self, step: int) -> float:
        """Returns the cost of the dearest rank of a step over the mean of all ranks; 1 where nothing costs anything."""
        costs = self.rank_costs(step)
        mean = costs.mean()
        return float(costs.max() / mean) if mean > 0 else 1.0

    def imbalances(self) -> Floats:
        """Returns `imbalance` of every step, float64 `[num_steps]`."""
        return step_imbalances(self._samples, self._ranks, self._bounds, self._lengths, self.cost, self.world_size)[self._turn]

    def step_sums(self, values: Floats | Ints) -> Floats:
        """Returns the sum of a per-sample quantity over each global step, float64 `[num_steps]`, the same bits at every world size.

        Args:
            values: one number per sample, `[N]`, such as the targets of each.
        """
        if not self.num_steps:
            return np.zeros(0)
        sums: Floats = np.add.reduceat(np.asarray(values, np.float64)[self._samples], self._bounds[:-1])
        return sums[self._turn]

    def summary(self) -> dict[str, float]:
        """Returns the plan in numbers: steps, tokens and samples a rank and step, cost imbalance, dummies."""
        tokens, imbalance = self.step_sums(self._lengths), self.imbalances()
        samples = np.diff(self._bounds)
        # A rank without samples takes a dummy.
        dummies = sum(int((self.rank_samples(step) == 0).sum()) for step in range(self.num_steps))
        some = self.num_steps > 0
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "step_tokens_min": float(tokens.min()) if some else 0.0,
            "step_tokens_mean": float(tokens.mean()) if some else 0.0,
            "step_tokens_max": float(tokens.max()) if some else 0.0,
            "samples_per_rank_mean": float(samples.mean()) / self.world_size if some else 0.0,
            "imbalance_mean": float(imbalance.mean()) if some else 1.0,
            "imbalance_p99": float(np.quantile(imbalance, 0.99)) if some else 1.0,
            "imbalance_max": float(imbalance.max()) if some else 1.0,
            "num_dummies": dummies,
        }


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
) -> EpochPlan:
    """Returns the plan of one epoch: each sample in exactly one step on exactly one rank, and equal steps on all ranks.

    The order is a permutation keyed by `(seed, epoch)`. It is cut into about `total / budget` global steps of about equal tokens, the last
    one too; a sample that does not fit what is left of a step is among the first of the next. Inside a step the dearest sample comes first
    and goes to the rank with the least cost so far. With `global_tokens` neither the steps nor the order of their samples depend on the
    world size.

    Args:
        lengths: tokens of each sample, integers `[N]`.
        world_size: ranks (`W`).
        max_tokens: most tokens of one rank in a step; the budget of a global step is `world_size * max_tokens`.
        global_tokens: budget of a global step, for every world size; a `max_tokens` beside it is only checked.
        seed: seed of the shuffle.
        epoch: number of the epoch; another epoch has another order.
        shuffle: false keeps the samples in order, for evaluation.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`.
        max_samples: most samples of one rank in a step; default `max_tokens`, so that empty histories do not pile up. With
            `global_tokens` a step holds at most `global_tokens` samples, and `max_samples` is only checked.
        bucket_steps: global steps that share one pool sorted by length; 1 is a pure shuffle, more packs like lengths together.

    Raises:
        ValueError: for a budget that is missing, below 1 or below the longest sample, for negative lengths, and, with `global_tokens`, for
            a step that no dealing fits under `max_tokens` or `max_samples`.
    """
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    _check(sizes, world_size, max_tokens, global_tokens, max_samples, bucket_steps, cost)
    if global_tokens is not None:
        budget, limit = global_tokens, global_tokens
        cap_samples = NO_CAP if max_samples is None else max_samples
    else:
        assert max_tokens is not None
        cap_samples = max_tokens if max_samples is None else max_samples
        budget, limit = world_size * max_tokens, world_size * cap_samples
    cap_tokens = NO_CAP if max_tokens is None else max_tokens
    random = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, epoch % 2**64], np.uint64)))
    order = random.permutation(len(sizes)) if shuffle else np.arange(len(sizes))
    if bucket_steps > 1:
        sort_pools(order, sizes, bucket_steps * budget, bucket_steps * limit)
    price = (float(cost[0]), float(cost[1]), float(cost[2]))
    caps = (budget, limit, cap_tokens, cap_samples)
    samples, ranks, bounds = _even_walk(order, sizes, price, world_size, caps, may_carry=global_tokens is None)
    num_steps = len(bounds) - 1
    turn = random.permutation(num_steps) if shuffle and bucket_steps > 1 else np.arange(num_steps)
    return EpochPlan(world_size, seed, epoch, price, len(sizes), int(sizes.sum()), sizes, samples, ranks, bounds, turn)


def _even_walk(
    order: Ints, lengths: Ints, cost: Cost, world_size: int, caps: tuple[int, int, int, int], *, may_carry: bool
) -> tuple[Ints, Ints, Ints]:
    budget, limit, cap_tokens, cap_samples = caps
    total = int(lengths.sum())
    num_steps = max(-(-total // budget), -(-len(lengths) // limit))
    # Where the budget is all but exactly used, what found no place ends up in a small last step: then one more pass pays.
    for _attempt in range(2):
        samples, ranks, bounds, failed = walk(
            order, lengths, cost, world_size, budget, limit, cap_tokens, cap_samples, may_carry, num_steps
        )
        if failed >= 0:
            raise problem(
                "A global step does not fit its ranks",
                got=f"step {failed}: a sample finds no rank with room",
                wanted=f"at most {cap_tokens} tokens and {cap_samples} samples on each of {world_size} ranks",
                where="batching.global_tokens with max_tokens or max_samples",
                todo="lower global_tokens, raise max_tokens and max_samples, or drop them: global_tokens needs no cap",
            )
        made = len(bounds) - 1
        if made == num_steps or total == 0:
            break
        tokens = np.add.reduceat(lengths[samples], bounds[:-1])
        if tokens.min() >= 0.9 * tokens.mean():
            break
        num_steps = made
    return samples, ranks, bounds


def _check(
    lengths: Ints,
    world_size: int,
    max_tokens: int | None,
    global_tokens: int | None,
    max_samples: int | None,
    bucket_steps: int,
    cost: Cost,
) -> None:
    if lengths.ndim != 1:
        raise problem(
            "Lengths are no list", got=f"shape {lengths.shape}", wanted="[N]", where="plan_epoch", todo="pass one length a sample"
        )
    if max_tokens is None and global_tokens is None:
        raise problem("No token budget", got="neither", wanted="max_tokens or global_tokens", where="batching", todo="set one of them")
    whole = {"max_tokens": max_tokens, "global_tokens": global_tokens, "max_samples": max_samples, "bucket_steps": bucket_steps}
    for name, value in {**whole, "world_size": world_size}.items():
        if value is not None and value < 1:
            raise problem("A size is too small", got=value, wanted="at least 1", where=f"batching.{name}", todo=f"raise {name}")
    if min(cost) < 0:
        raise problem("A cost is negative", got=cost, wanted="a, b, c >= 0", where="plan_epoch(cost=)", todo="pass the encoder's cost")
    if not len(lengths):
        return
    if lengths.min() < 0:
        at = int(lengths.argmin())
        raise problem("A length is negative", got=int(lengths[at]), wanted=">= 0", where=f"sample {at}", todo="pass lengths, not offsets")
    budgets = {"max_tokens": max_tokens, "global_tokens": global_tokens}
    budget, name = min((value, name) for name, value in budgets.items() if value is not None)
    at = int(lengths.argmax())
    if lengths[at] > budget:
        raise problem(
            "A sample is longer than the token budget",
            got=f"sample {at} has length {int(lengths[at])}, one of {int((lengths > budget).sum())} above the budget",
            wanted=f"at most {budget} tokens",
            where=f"batching.{name}",
            todo=f"raise {name} to {int(lengths[at])} or more, or cut histories with data.max_len",
        )
