"""The store of a run as its ranks need it: opened in place, staged from elsewhere, or only the rows of this node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.batching.nodes import Shares, assign_rows, count_nodes
from distrag.checkpoint import take_turns
from distrag.config import RunConfig
from distrag.data.checks import check_values
from distrag.data.remote import is_url
from distrag.data.split import View, build_views
from distrag.data.stage import DEFAULT_CACHE, Stage
from distrag.data.store import Store, open_folder, open_store
from distrag.problem import problem
from distrag.world import World, agreed

Count = Callable[[View], NDArray[np.float64]]


@dataclass(frozen=True)
class Place:
    """This rank's node among the nodes, and which rows each of them holds.

    Attributes:
        world: the ranks.
        shares: the rows of each node.
    """

    world: World
    shares: Shares

    @property
    def node(self) -> int:
        """Number of this node."""
        return self.world.rank // self.world.local_size

    def owns(self, view: View) -> NDArray[np.bool_]:
        """Returns which samples of a view are of this node, bool `[n]`."""
        own: NDArray[np.bool_] = self.shares.nodes_of(view.rows) == self.node
        return own

    def counted(self, count: Count) -> Count:
        """Returns `count` for every sample of a view, each counted on its own node. A collective: all ranks call it."""

        def counts(view: View) -> NDArray[np.float64]:
            found = np.zeros(len(view))
            if self.world.local_rank == 0:
                own = np.flatnonzero(self.owns(view))
                found[own] = count(View(view.rows[own], view.begin[own], view.end[own], view.next[own], view.first[own], num_cut=0))
            total: NDArray[np.float64] = self.world.all_reduce_sum(torch.from_numpy(found).to(self.world.device)).cpu().numpy()
            return total

        return counts


def node_options(config: RunConfig, store: Store, place: Place | None, view: View) -> dict[str, Any]:
    """Returns what a NodeSampler of a view must know of the nodes: how many there are, and whose each sample is for any number of them."""

    here = 0 if place is None else place.shares.num_nodes

    def nodes_of(num_nodes: int) -> NDArray[np.int64]:
        shares = place.shares if place and num_nodes == here else assign_rows(_train_lengths(config, store), num_nodes)
        return shares.nodes_of(view.rows)

    return {"nodes_of": nodes_of, "num_nodes": here}


def open_run_store(config: RunConfig, world: World) -> tuple[Store, Place | None]:
    """Returns the store that these ranks train on, and their place among the nodes where `batching.locality` is `node`.

    A collective: what is staged may take long, and is done in turns in which no rank waits past the time limit of a collective.

    Raises:
        ValueError: the same on every rank: no store there, one that cannot be staged, or nodes that are not alike.
    """
    nodes = count_nodes(world) if config.batching.locality == "node" else 0
    if not nodes:
        return _checked(_open_staged(config, world, None), world, world.rank, world.size), None
    store = _open_staged(config, world, _NO_ROWS)
    shares = agreed(world, lambda: assign_rows(_train_lengths(config, store), nodes))
    place = Place(world, shares)
    held = _open_staged(config, world, shares.spans(place.node))
    return _checked(held, world, world.local_rank, world.local_size), place


def _checked(store: Store, world: World, part: int, parts: int) -> Store:
    """Returns the store once all ranks have the same one, and each has read its share of the values: an id that no table has would
    otherwise be met by one rank, in the middle of a step that the others wait in."""
    hashes = world.all_gather_object(store.content_hash)
    for rank, found in enumerate(hashes):
        if found != hashes[0]:
            todo = "give every machine the same store, or set data.path to an address that all of them reach"
            got, wanted = f"content hash {found} on rank {rank}", f"{hashes[0]}, as on rank 0"
            raise problem("The ranks have different stores", got=got, wanted=wanted, where="data.path", todo=todo)
    agreed(world, lambda: check_values(store, part, parts))
    return store


def open_lengths(config: RunConfig) -> Store:
    """Returns the store of a run of which only the lengths may be read, unless its split needs more; without other ranks.

    Raises:
        ValueError: as `open_store`.
    """
    stage = _stage(config)
    if stage is None or config.data.split.kind == "time":
        return open_store(config.data.path, cache=config.data.cache)
    for _ in stage.fetch(_NO_ROWS):
        pass
    return open_folder(stage.folder, _NO_ROWS)


_NO_ROWS = np.zeros((0, 2), np.int64)


def _train_lengths(config: RunConfig, store: Store) -> NDArray[np.int64]:
    """Returns the tokens that each row of the store gives to an epoch; the same rows stay together whatever valid is folded into."""
    view = build_views(store, config.data.split, task=config.task, max_len=config.data.max_len)["train"]  # type: ignore[arg-type]
    tokens = np.zeros(store.num_samples, np.int64)
    tokens[view.rows] = view.lengths
    return tokens


def _open_staged(config: RunConfig, world: World, rows: NDArray[np.int64] | None) -> Store:
    stage = agreed(world, lambda: _stage(config))
    if stage is None:
        return agreed(world, lambda: open_folder(config.data.path, rows))
    take_turns(world, stage.fetch(rows))
    return agreed(world, lambda: open_folder(stage.folder, rows))


def _stage(config: RunConfig) -> Stage | None:
    data = config.data
    return Stage(data.path, data.cache or DEFAULT_CACHE) if is_url(data.path) or data.cache else None
