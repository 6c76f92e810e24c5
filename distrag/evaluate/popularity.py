"""Ranking by popularity, through the same evaluator as a model: the floor that a trained model has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.data.split import SplitConfig, build_views
from distrag.data.store import Store
from distrag.evaluate.catalogue import Ranks, build_catalogue
from distrag.evaluate.ranking import HeldOut, RankingEvaluator
from distrag.problem import problem

Kind = Literal["all", "train"]


def evaluate_popularity(
    store: Store, world: Ranks, kind: Kind = "all", ks: Sequence[int] = (5, 10, 20), *, target: str | None = None
) -> dict[str, int | float]:
    """Returns the metrics of ranking each user's last item by popularity; ties go to the smaller item row.

    Leave-one-out: users with at least 3 events, seen items removed. A collective: all ranks call it; each takes an equal share of users and
    of items.

    Args:
        store: the data set.
        world: the ranks.
        kind: `all` counts every event, also the held-out ones, as published popularity rows do; `train` leaves each user's two held-out
            events out.
        ks: cut-offs.
        target: the ranked id feature; None takes the first of the history.

    Raises:
        ValueError: an unknown kind, or a store without an id feature.
    """
    if kind not in ("all", "train"):
        raise problem("An unknown kind of popularity", got=kind, wanted="all or train", where="--popularity", todo="name one of the two")
    name, num_rows = _target(store, target)
    items = store.position(name)
    views = build_views(store, SplitConfig(kind="leave_one_out"), task="next_item", max_len=1)
    held = [] if kind == "all" else [items[views[part].next] for part in ("valid", "test")]
    counts = np.bincount(items, minlength=num_rows) - sum(np.bincount(ids, minlength=num_rows) for ids in held)
    return rank_by_score(world, counts, HeldOut.of(views["test"], items), ks)


def _target(store: Store, target: str | None) -> tuple[str, int]:
    for feature in store.schema.history:
        if feature.kind == "id" and feature.table is not None and target in (None, feature.name):
            return feature.name, store.schema.table(feature.table).num_rows
    got, todo = [f.name for f in store.schema.history], "prepare the data with an id feature in the history, or name one of these"
    raise problem("No such id feature in the history", got=got, wanted=target or "an id feature", where=store.path, todo=todo)


def rank_by_score(world: Ranks, scores: NDArray[np.generic], held_out: HeldOut, ks: Sequence[int]) -> dict[str, int | float]:
    """Returns the metrics of ranking items by one score each, the same for every user.

    Args:
        world: the ranks.
        scores: `[V]`, the same on every rank; any type with an order.
        held_out: targets and seen items.
        ks: cut-offs.
    """
    # Levels order items as their scores do and stay exact in float32, where counts beyond 2**24 would not.
    levels = np.unique(scores, return_inverse=True)[1]
    table = torch.from_numpy(levels.astype(np.float32))[:, None].to(world.device)
    evaluator = RankingEvaluator(world, build_catalogue(world, [(0, 0, table)], len(levels), 1), held_out, ks)
    for chunk in np.array_split(np.arange(len(held_out.targets)), -(-len(held_out.targets) // evaluator.flush_at) or 1):
        shares = np.array_split(chunk, world.size)
        evaluator.add(torch.ones(len(shares[world.rank]), 1, device=world.device), shares)
    return evaluator.result()
