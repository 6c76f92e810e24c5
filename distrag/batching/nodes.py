"""Epochs in which every rank takes rows of its own node: who holds which rows, and the plan over these shares.

Both follow from the lengths alone, so that all ranks compute the same without talking to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distrag.batching.checks import as_lengths
from distrag.batching.layout import hash_lengths
from distrag.batching.plan import EpochPlan, fingerprint_of, plan_epoch
from distrag.batching.sampler import TokenBudgetSampler
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from distrag.batching.compiled import Ints
    from distrag.world import World

STRIPES = 32
"""Stripes of a node: enough to mix users of a sorted file, few enough that their edges add little to what is staged."""
FEW_ROWS = 2048
"""Up to so many rows a node, stripes are single rows: so small a store is balanced row by row, and staging most of it costs nothing."""

_TOLERANCE = 0.003
"""Tokens that a node may have above the mean; what is moved for less would cost balance in squared lengths."""


@dataclass(frozen=True)
class Shares:
    """The rows of a store, in stripes that each belong to one node.

    Attributes:
        num_nodes: nodes.
        bounds: int64 `[K+1]`, where each stripe begins, and the number of rows.
        owners: int64 `[K]`, the node of each stripe.
    """

    num_nodes: int
    bounds: Ints
    owners: Ints

    def spans(self, node: int) -> Ints:
        """Returns the rows of a node as int64 `[R, 2]`: the first of each span and one past its last, ascending and apart."""
        own = np.concatenate([[False], self.owners == node, [False]])
        edges: Ints = np.flatnonzero(own[1:] != own[:-1])
        return self.bounds[edges].reshape(-1, 2)

    def nodes_of(self, rows: Ints) -> Ints:
        """Returns the node of each row, int64."""
        return self.owners[np.searchsorted(self.bounds, rows, side="right") - 1]


def assign_rows(lengths: ArrayLike, num_nodes: int) -> Shares:
    """Returns the share of each node: equal in tokens, and about equal in squared lengths, which weigh in attention.

    Rows are cut in order into stripes of equal tokens. Of each `num_nodes` stripes, from the dearest on, every node gets one, the one
    with the least so far the dearest: so that a file sorted by length is balanced too.

    Args:
        lengths: tokens of each row, integers `[N]`, the same on all ranks.
        num_nodes: nodes.
    """
    tokens = np.asarray(lengths, np.int64)
    bounds = np.arange(len(tokens) + 1) if len(tokens) <= num_nodes * FEW_ROWS else _cut(tokens, num_nodes * STRIPES)
    squares = np.add.reduceat(np.square(tokens, dtype=np.float64), bounds[:-1]) if len(tokens) else np.zeros(0)
    owners, load = np.zeros(len(squares), np.int64), np.zeros(num_nodes)
    order = np.argsort(-squares, kind="stable")
    for first in range(0, len(order), num_nodes):
        group = order[first : first + num_nodes]
        nodes = np.argsort(load, kind="stable")[: len(group)]
        owners[group] = nodes
        load[nodes] += squares[group]
    if len(tokens) > num_nodes * FEW_ROWS:
        bounds = _level(tokens, bounds, owners, num_nodes)
    kept = np.flatnonzero(np.diff(bounds))
    return Shares(num_nodes, np.append(bounds[kept], len(tokens)), owners[kept])


def _cut(tokens: Ints, count: int) -> Ints:
    """Returns where stripes of equal tokens begin, and the end; `count` of them, fewer where one row has more than its part."""
    size = len(tokens)
    total = np.concatenate([[0.0], np.cumsum(tokens) + np.arange(1, size + 1) / size])  # rows without tokens are spread by their number
    return np.unique(np.concatenate([[0], _nearest(total, np.arange(count + 1) * (total[-1] / count)), [size]]))


def _nearest(before: NDArray[Any], wanted: NDArray[Any]) -> Ints:
    """Returns the rows before which there is about as much as is wanted, from the running total `[N+1]`."""
    above = np.clip(np.searchsorted(before, wanted), 1, len(before) - 1)
    nearest: Ints = np.where(before[above] - wanted < wanted - before[above - 1], above, above - 1)
    return nearest


def _level(tokens: Ints, bounds: Ints, owners: Ints, num_nodes: int) -> Ints:
    """Returns where the stripes begin once a node with too many tokens has passed some to those whose stripes lie beside its own."""
    before, bounds = np.concatenate([[0], np.cumsum(tokens)]), bounds.copy()
    load = np.bincount(owners, np.diff(before[bounds]), minlength=num_nodes)
    over = load - (1 + _TOLERANCE) * load.mean()
    for _ in range(2):
        for i in range(1, len(owners)):
            left, right = owners[i - 1], owners[i]
            here = before[bounds[i]]
            to_right = min(max(over[left], 0), max(-over[right], 0), (here - before[bounds[i - 1]]) / 2)
            to_left = min(max(over[right], 0), max(-over[left], 0), (before[bounds[i + 1]] - here) / 2)
            if to_right or to_left:
                bounds[i] = _nearest(before, np.array([here - to_right + to_left]))[0]
                over[left] += before[bounds[i]] - here
                over[right] -= before[bounds[i]] - here
    return bounds


class NodePlan(EpochPlan):
    """The steps of one epoch in which each rank takes samples of its own node: a plan for each node, side by side.

    Attributes:
        plans: the plan of each node over its own samples, for the ranks of one node.
    """

    def __init__(self, plans: Sequence[EpochPlan]) -> None:
        first = plans[0]
        self.plans, self._local_size = tuple(plans), first.world_size
        self.world_size, self.seed, self.epoch, self.cost = len(plans) * first.world_size, first.seed, first.epoch, first.cost
        self.num_samples, self.num_tokens = sum(plan.num_samples for plan in plans), sum(plan.num_tokens for plan in plans)
        self.first_step, self.num_steps = first.first_step, max(plan.num_steps for plan in plans)
        self.fingerprint, self._lengths = first.fingerprint, first._lengths

    def _at(self, step: int) -> list[tuple[int, EpochPlan]]:
        """Returns the first rank and the plan of each node that has samples left for a step."""
        if not self.first_step <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of the steps from {self.first_step} to {self.num_steps - 1}")
        return [(node * self._local_size, plan) for node, plan in enumerate(self.plans) if step < plan.num_steps]

    def step_samples(self, step: int) -> Ints:
        """Returns the sample numbers of a global step over all ranks, int64, node by node."""
        return np.concatenate([plan.step_samples(step) for _, plan in self._at(step)])

    def step_ranks(self, step: int) -> Ints:
        """Returns the rank of each of `step_samples`, int32."""
        return np.concatenate([plan.step_ranks(step) + rank for rank, plan in self._at(step)])

    def samples(self, step: int, rank: int) -> Ints:
        """Returns the sample numbers of one rank in one step, int64; empty where the rank has to take a dummy."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a plan for {self.world_size} ranks")
        plan = dict(self._at(step)).get(rank // self._local_size * self._local_size)
        return np.zeros(0, np.int64) if plan is None else plan.samples(step, rank % self._local_size)


def plan_nodes(
    lengths: Ints, node_of: Ints, num_nodes: int, *, world_size: int, samples: Ints | None = None, first_step: int = 0, **options: Any
) -> NodePlan:
    """Returns the plan of one epoch in which each rank takes samples of its own node, and equal steps on all ranks.

    Args:
        lengths: tokens of each sample, integers `[N]`.
        node_of: the node of each sample, int64 `[N]`.
        num_nodes: nodes, of `world_size / num_nodes` ranks each.
        world_size: ranks (`W`).
        samples: plan these sample numbers only, integers.
        first_step: number of the first step.
        **options: as for `plan_epoch`; no `global_tokens`.

    Raises:
        ValueError: as `plan_epoch`, and for a global budget.
    """
    if options.get("global_tokens") is not None:
        todo = "set max_tokens instead"
        got, wanted = f"global_tokens {options['global_tokens']} for nodes", "max_tokens: which samples form a step depends on the nodes"
        raise problem("Steps cannot be the same for every number of nodes", got=got, wanted=wanted, where="plan_nodes", todo=todo)
    numbers = np.arange(len(node_of)) if samples is None else np.asarray(samples, np.int64)
    order = np.argsort(node_of[numbers], kind="stable")
    own = np.split(numbers[order], np.searchsorted(node_of[numbers][order], np.arange(1, num_nodes)))
    sizes = as_lengths(lengths)
    common: dict[str, Any] = {
        "world_size": world_size // num_nodes,
        "first_step": first_step,
        "pool_samples": max(_POOL_SAMPLES, 16 * _POOL_SAMPLES // num_nodes),
        "fingerprint": fingerprint_of(hash_lengths(sizes), len(sizes), options.get("seed", 0), options.get("shuffle", True)),
        **options,
    }
    plans = [plan_epoch(sizes, samples=its, **common) for its in own]
    for _ in range(_ROUNDS):
        most = max(plan.num_steps for plan in plans)
        if all(plan.num_steps in (most, first_step) for plan in plans):
            break
        for node, plan in enumerate(plans):
            if first_step < plan.num_steps < most:
                plans[node] = plan_epoch(sizes, samples=own[node], num_steps=most - first_step, **common)
    return NodePlan(plans)


_POOL_SAMPLES = 1 << 13
_ROUNDS = 4
"""A node that is asked for more steps may make a few too many; whoever still has fewer after so many rounds ends with empty steps."""


class NodeSampler(TokenBudgetSampler):
    """A TokenBudgetSampler that can give each rank samples of its own node only, and continue epochs that were begun with other nodes.

    Args:
        dataset: as for `TokenBudgetSampler`.
        nodes_of: gives the node of each sample, int64 `[N]`, for a number of nodes.
        num_nodes: nodes; 0 gives any sample to any rank.
        **options: as for `TokenBudgetSampler`.
    """

    def __init__(self, dataset: Any, *, nodes_of: Callable[[int], Ints], num_nodes: int = 0, **options: Any) -> None:
        self._nodes_of, self._num_nodes = cache(nodes_of), num_nodes
        super().__init__(dataset, **options)

    def _build_plan(self) -> EpochPlan:
        self._options["num_nodes"] = self._num_nodes
        return super()._build_plan()

    def _plan_by(self, options: dict[str, Any], samples: Ints | None, first_step: int) -> EpochPlan:
        options = dict(options)
        num_nodes = options.pop("num_nodes", 0)
        if not num_nodes:
            return super()._plan_by(options, samples, first_step)
        drawn: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self.epoch,
            "shuffle": self.shuffle,
            "samples": samples,
            "first_step": first_step,
        }
        return plan_nodes(self.lengths, self._nodes_of(num_nodes), num_nodes, **drawn, **options)


def count_nodes(world: World) -> int:
    """Returns the number of nodes, each with as many ranks. A collective: all ranks call it.

    Raises:
        ValueError: on every rank, when nodes have different numbers of ranks, or ranks are not numbered node by node.
    """
    size = world.local_size
    found = world.all_gather_object((world.local_rank, size))
    if found != [(rank % size, size) for rank in range(world.size)]:
        todo = "start as many processes on each node, or set batching.locality to global"
        got = ", ".join(f"rank {rank}: {local} of {its}" for rank, (local, its) in enumerate(found))
        raise problem("Nodes are not alike", got=got, wanted="as many ranks on each node", where="batching.locality: node", todo=todo)
    return world.size // size
