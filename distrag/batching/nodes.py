"""Epochs in which every rank takes rows of its own node: who holds which rows, and the plan over these shares.

Both follow from the lengths alone, so that all ranks compute the same without talking to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from distrag.batching.compiled import Ints
    from distrag.world import World

STRIPES = 16
"""Stripes of a node: enough to mix users of a sorted file, few enough that their edges add little to what is staged."""
FEW_ROWS = 1024
"""Up to so many rows a node, stripes are single rows: so small a store is balanced row by row, and staging most of it costs nothing."""


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
    return Shares(num_nodes, bounds, owners)


def _cut(tokens: Ints, count: int) -> Ints:
    """Returns where stripes of equal tokens begin, and the end; `count` of them, fewer where one row has more than its part."""
    size = len(tokens)
    total = np.concatenate([[0.0], np.cumsum(tokens) + np.arange(1, size + 1) / size])  # rows without tokens are spread by their number
    wanted = np.arange(count + 1) * (total[-1] / count)
    above = np.clip(np.searchsorted(total, wanted), 1, size)
    nearest = np.where(total[above] - wanted < wanted - total[above - 1], above, above - 1)
    return np.unique(np.concatenate([[0], nearest, [size]]))


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
