"""How an epoch falls into pools: which blocks of samples each takes and how many steps it makes, known before the first is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distrag.batching.deal import NO_CAP
from distrag.batching.pool import ROWS, Rules, plan_pool
from distrag.batching.rows import shuffle as shuffle_in_place
from distrag.batching.rows import shuffle_two
from distrag.batching.survey import add_up, class_table, fullest_bin, gather_pool, look, tokens_by_class
from distrag.problem import problem

if TYPE_CHECKING:
    from distrag.batching.compiled import Ints

MAX_BLOCKS = 1 << 19
_FIXED = np.uint64(0x9E3779B97F4A7C15)
SLACKS = (0.01, 0.03)
"""Shares of the budget to leave free where pools are planned later, until the bound on the fullest rank proves that each will fit."""


@dataclass(frozen=True)
class Layout:
    """The pools of one epoch.

    Attributes:
        num_tokens: tokens in the epoch.
        lengths_hash: hash of all lengths in their order.
    """

    num_tokens: int
    lengths_hash: int
    _block: int = field(repr=False)
    _order: Ints = field(repr=False)
    _blocks: Ints = field(repr=False)
    _steps: Ints = field(repr=False)
    _states: Ints = field(repr=False)

    @property
    def num_steps(self) -> int:
        """Steps of all pools."""
        return int(self._steps[-1])

    @property
    def num_pools(self) -> int:
        """Pools."""
        return len(self._steps) - 1

    def find(self, step: int) -> tuple[int, int]:
        """Returns the pool of a step, and its place in it."""
        pool = int(np.searchsorted(self._steps, step, side="right")) - 1
        return pool, step - int(self._steps[pool])

    def steps_of(self, pool: int) -> int:
        """Returns the steps that a pool makes."""
        return int(self._steps[pool + 1] - self._steps[pool])

    def take(self, lengths: Ints, pool: int) -> tuple[Ints, Ints, np.uint64]:
        """Returns the shuffled sample numbers of a pool, their lengths, both int64 `[n]`, and the state of its generator."""
        first, last = int(self._blocks[pool]), int(self._blocks[pool + 1])
        samples, sizes = np.empty((last - first) * self._block, np.int64), np.empty((last - first) * self._block, np.int64)
        taken = gather_pool(lengths, self._order, first, last, self._block, samples, sizes)
        samples, sizes, state = samples[:taken], sizes[:taken], np.uint64(self._states[pool])
        if self._block > 1 and state:
            state = shuffle_two(samples, sizes, state)
        return samples, sizes, np.uint64(state)


class _Need(NamedTuple):
    """How many steps it takes."""

    rules: Rules
    longest: int
    least: int

    @property
    def caps(self) -> tuple[int, int, int]:
        """Bins of a step, and the tokens and samples that one may hold."""
        rules = self.rules
        if rules.whole_steps:
            return 1, rules.step_tokens, rules.step_samples
        return rules.world_size, rules.rank_tokens, rules.rank_samples

    def exact(self, tokens: int, samples: int) -> float:
        """Returns the steps that so much fills to the brim."""
        bins, cap_tokens, cap_samples = self.caps
        if self.rules.bucket_steps > 1:
            cap_tokens -= min(self.longest, cap_tokens // 8)  # a sorted list is cut between neighbours of like length
        return max(tokens / (bins * cap_tokens), samples / (bins * cap_samples))

    def even(self, steps: int) -> int:
        """Returns as many steps or a few more, so that all lists that are sorted and cut make equally many."""
        groups = -(-steps // self.rules.bucket_steps)
        return -(-steps // groups) * groups


def build_layout(lengths: Ints, rules: Rules, seed: int, epoch: int, *, shuffle: bool, num_steps: int, pool_samples: int) -> Layout:
    """Returns the pools of an epoch.

    Few samples are one pool, which is planned at once to see how many steps it needs. More are cut into pools of whole steps whose number
    follows from the tokens; a bound on the fullest rank proves that each pool fits. Where no bound can, because a cap is tight, every
    pool is planned once to see.

    Args:
        lengths: int64 or int32 `[N]`.
        rules: caps and cost.
        seed: seed of the shuffle.
        epoch: number of the epoch.
        shuffle: false draws nothing: the blocks lie in one fixed order.
        num_steps: make at least so many; 0 for as few as fit.
        pool_samples: samples of a pool; up to twice as many are one.

    Raises:
        ValueError: for lengths below 0 or above a budget, and for steps that no dealing fits.
    """
    n, block = len(lengths), 1
    while -(-n // block) > MAX_BLOCKS:
        block *= 2
    none = np.zeros(1, np.int64)
    if not n:
        return Layout(0, 0, block, none[:0], none, none, none[:0].astype(np.uint64))
    sums = np.empty(-(-n // block), np.int64)
    total, shortest, longest, lengths_hash = look(lengths, block, sums)
    _check_lengths(lengths, int(shortest), int(longest), rules)
    random = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, epoch % 2**64], np.uint64)))
    order = np.arange(len(sums), dtype=np.uint32)
    if shuffle or n > 2 * pool_samples:  # a sorted file must not make one pool of all that is short
        shuffle_in_place(order, random.integers(1, 2**64, dtype=np.uint64) if shuffle else _FIXED)
    # Where steps are the same for all numbers of ranks, what a rank can hold has no say in them; it is looked at afterwards.
    alone = rules._replace(world_size=1, rank_tokens=NO_CAP, rank_samples=NO_CAP)
    need = _Need(alone if rules.whole_steps else rules, int(longest), num_steps)
    layout = Layout(int(total), int(lengths_hash), block, order, np.array([0, len(order)]), none, none.astype(np.uint64))
    for slack in SLACKS if n > 2 * pool_samples else ():
        layout = _cut(layout, need, sums, n, slack, pool_samples)
        if shuffle:
            layout = replace(layout, _states=random.integers(1, 2**64, layout.num_pools, dtype=np.uint64))
        if _is_proven(lengths, layout, need):
            break
    else:
        if n <= 2 * pool_samples and shuffle:
            layout = replace(layout, _states=random.integers(1, 2**64, 1, dtype=np.uint64))
        layout = _try_pools(lengths, layout, need)
    if rules.whole_steps:
        _check_ranks(lengths, layout, rules, int(longest))
    return layout


def hash_lengths(lengths: Ints) -> int:
    """Returns the hash of all lengths in their order that a layout of them has."""
    return int(look(lengths, len(lengths), np.empty(1, np.int64))[3]) if len(lengths) else 0


def _cut(layout: Layout, need: _Need, sums: Ints, num_samples: int, slack: float, pool_samples: int) -> Layout:
    """Returns the layout in pools of about `pool_samples`, each with as many blocks as its steps are of all steps."""
    _, cap_tokens, cap_samples = need.caps
    steps = max(math.ceil(need.exact(layout.num_tokens, num_samples) * (1 + slack)), need.least, 1)
    bucket = need.rules.bucket_steps
    # Ranks are evened out over the steps of a pool, so a pool of large steps may be twice as large to have eight.
    size = max(pool_samples, min(8 * num_samples // steps, 2 * pool_samples))
    per_pool = max(round(size * steps / num_samples) // bucket, 1) * bucket
    pools = max(1, steps // per_pool)
    counts = np.diff(np.arange(pools + 1) * steps // pools)
    ends = np.array([0, *np.cumsum([need.even(int(count)) for count in counts])], np.int64)
    # What fills the steps is what pools share out evenly: tokens, or samples where histories are short.
    by_tokens = layout.num_tokens * cap_samples >= num_samples * cap_tokens
    filled = add_up(sums, layout._order) if by_tokens else np.arange(1, len(sums) + 1)
    inner = np.searchsorted(filled, ends[1:-1] / ends[-1] * float(filled[-1])) + 1
    blocks = np.array([0, *np.minimum(inner, len(sums)), len(sums)], np.int64)
    return replace(layout, _blocks=blocks, _steps=ends, _states=np.zeros(pools, np.uint64))


def _is_proven(lengths: Ints, layout: Layout, need: _Need) -> bool:
    """Returns whether every pool is sure to fit its steps, from the lengths it holds and not from a plan of it."""
    rules, (bins, cap_tokens, cap_samples) = need.rules, need.caps
    table, top = class_table(need.longest)
    tokens, samples = np.empty((layout.num_pools, len(top)), np.int64), np.empty(layout.num_pools, np.int64)
    tokens_by_class(lengths, layout._order, layout._blocks, layout._block, table, tokens, samples)
    for pool in range(layout.num_pools):
        steps, num_samples, num_tokens = layout.steps_of(pool), int(samples[pool]), int(tokens[pool].sum())
        # By rows no bin holds more than the mean and two of the longest (whole steps: one and a unit of them), and about equally many.
        rows = math.ceil(math.ceil(num_samples / bins) / steps)
        spare = rows // ROWS + 1 if rules.whole_steps else 1
        fits = num_tokens // (steps * bins) + (spare + 1) * need.longest < cap_tokens and rows + spare - 1 <= cap_samples
        by_rows = rules.bucket_steps == 1 and fits
        packed = cap_samples >= cap_tokens and num_samples <= steps * bins * cap_samples
        if num_samples < steps * bins or not (by_rows or (packed and fullest_bin(tokens[pool], top, steps * bins) <= cap_tokens)):
            return False
    return True


def _try_pools(lengths: Ints, layout: Layout, need: _Need) -> Layout:
    """Returns the layout with the steps that each pool needs, found by planning it."""
    rules, ends = need.rules, [0]
    for pool in range(len(layout._blocks) - 1):
        samples, sizes, state = layout.take(lengths, pool)
        tokens, share = int(sizes.sum()), len(samples) / len(lengths)
        bins, cap_tokens, _ = need.caps
        halves = math.ceil(np.count_nonzero(sizes > cap_tokens // 2) / bins)  # no two of these share a bin
        steps = need.even(max(1, math.ceil(need.exact(tokens, len(samples))), halves, math.ceil(need.least * share)))
        steps = min(steps, len(samples))
        last_for_rows = steps + steps // 8 + 1 if rules.bucket_steps > 1 else 0
        while len(samples):
            failed = plan_pool(sizes, rules, steps, state, steps > last_for_rows or steps == len(samples))[3]
            if failed == -1:
                break
            assert steps < len(samples), "a step for each sample fits"
            steps = min(need.even(steps + max(1, steps // 64)), len(samples))
        ends.append(ends[-1] + steps)
    return replace(layout, _steps=np.array(ends, np.int64))


def _check_ranks(lengths: Ints, layout: Layout, rules: Rules, longest: int) -> None:
    """Raises for a step that its ranks cannot hold; plans every pool to see, unless no step can be too much."""
    W = rules.world_size
    if rules.step_tokens // W + longest <= rules.rank_tokens and -(-rules.step_samples // W) <= rules.rank_samples:
        return
    for pool in range(layout.num_pools):
        _, sizes, state = layout.take(lengths, pool)
        failed = plan_pool(sizes, rules, layout.steps_of(pool), state, True)[3] if len(sizes) else -1
        if failed >= 0:
            raise _too_tight(rules, int(layout._steps[pool]) + failed)


def _too_tight(rules: Rules, step: int) -> ValueError:
    caps = [f"{cap} {what}" for cap, what in ((rules.rank_tokens, "tokens"), (rules.rank_samples, "samples")) if cap != NO_CAP]
    return problem(
        "A global step does not fit its ranks",
        got=f"step {step}: a sample finds no rank with room",
        wanted=f"at most {' and '.join(caps)} on each of {rules.world_size} ranks",
        where="batching.global_tokens with max_tokens or max_samples",
        todo="lower global_tokens, raise max_tokens and max_samples, or drop them: global_tokens needs no cap",
    )


def _check_lengths(lengths: Ints, shortest: int, longest: int, rules: Rules) -> None:
    if shortest < 0:
        at = int(lengths.argmin())
        raise problem("A length is negative", got=int(lengths[at]), wanted=">= 0", where=f"sample {at}", todo="pass lengths, not offsets")
    budget, name = min((rules.step_tokens, "global_tokens"), (rules.rank_tokens, "max_tokens"))
    if longest > budget:
        at = int(lengths.argmax())
        raise problem(
            "A sample is longer than the token budget",
            got=f"sample {at} has length {int(lengths[at])}, one of {int((lengths > budget).sum())} above the budget",
            wanted=f"at most {budget} tokens",
            where=f"batching.{name}",
            todo=f"raise {name} to {int(lengths[at])} or more, or cut histories with data.max_len",
        )
