"""What a config will do on W ranks, without a process group: steps, balance, padding, placement."""

from __future__ import annotations

from typing import Any

import numpy as np

from distrag.batching.plan import EpochPlan, plan_epoch
from distrag.config import RunConfig, check_number
from distrag.config.limits import INT32, Range
from distrag.data.schema import Schema
from distrag.data.split import build_views
from distrag.training.checks import check_job, check_length
from distrag.training.inputs import choose_features, is_read
from distrag.training.locality import open_lengths

MAX_RANKS = 65_536


def plan_run(config: RunConfig, world_size: int, epoch: int = 0) -> dict[str, Any]:
    """Returns the plan of an epoch in numbers; refuses what training refuses.

    What a rank may hold is checked where `tables.max_gib_per_rank` says it: the ranks are not this machine.

    Args:
        config: the run.
        world_size: ranks to plan for.
        epoch: which epoch.

    Raises:
        ValueError: for a config, store or world size that cannot be trained.
    """
    check_number(world_size, Range(1, MAX_RANKS), "--world-size")
    check_number(epoch, Range(0, INT32), "--epoch")
    store = open_lengths(config)
    limit = int(config.tables.max_gib_per_rank * 2**30) or None
    checked = check_job(config, store.schema, world_size, device=config.train.device, limit_bytes=limit)
    view = build_views(store, config.data.split, task=config.task, max_len=config.data.max_len)["train"]  # type: ignore[arg-type]
    batching = config.batching
    plan = plan_epoch(
        view.lengths,
        world_size=world_size,
        max_tokens=None if batching.global_tokens else batching.max_tokens,
        global_tokens=batching.global_tokens,
        max_samples=batching.max_samples,
        bucket_steps=batching.bucket_steps,
        seed=config.train.seed,
        epoch=epoch,
        cost=checked.cost,
    )
    run_steps = check_length(config, plan.num_steps)
    numbers = {"world_size": world_size, "epoch": epoch, **plan.summary(), "num_steps_of_run": run_steps, "num_cut": view.num_cut}
    load = [sum(p.bytes_per_rank for p in checked.placements if rank in p.ranks) for rank in range(world_size)]
    return {
        **numbers,
        **_per_rank(plan, view.lengths),
        "table_mib_per_rank_max": max(load) / 2**20,
        **_features(config, store.schema),
        "tables": [str(placement) for placement in checked.placements],
    }


def _features(config: RunConfig, schema: Schema) -> dict[str, list[str]]:
    """Returns what the model reads, and what the store has besides."""
    groups = {"history": (config.data.history, schema.history), "context": (config.data.context, schema.context)}
    read = {
        where: [f.name for f in choose_features(names, features, where) if is_read(f, where)] for where, (names, features) in groups.items()
    }
    left = [f"{where} {f.name}" for where, (_, features) in groups.items() for f in features if f.name not in read[where]]
    return {"features_read": [f"{where} {name}" for where, names in read.items() for name in names], "features_left_out": left}


def _per_rank(plan: EpochPlan, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """Returns tokens of a rank and step, and what a rank's padded batch would waste, over at most 256 steps spread over the epoch."""
    steps = np.unique(np.linspace(0, plan.num_steps - 1, 256).astype(int)) if plan.num_steps else np.zeros(0, int)
    tokens, kept, rectangle = [], 0, 0
    for step in steps:
        for rank in range(min(plan.world_size, 64)):
            own = lengths[plan.samples(int(step), rank)]
            tokens.append(int(own.sum()))
            kept, rectangle = kept + int(own.sum()), rectangle + len(own) * int(own.max(initial=0))
    some = np.array(tokens or [0])
    return {
        "rank_tokens_min": int(some.min()),
        "rank_tokens_mean": float(some.mean()),
        "rank_tokens_max": int(some.max()),
        "padded_batch_padding_share": 1.0 - kept / max(1, rectangle),
    }


def describe_plan(numbers: dict[str, Any]) -> str:
    """Returns the numbers of `plan_run` as lines to read."""
    plain = {key: value for key, value in numbers.items() if not isinstance(value, list)}
    lines = [f"{key:28} {value:,.4f}" if isinstance(value, float) else f"{key:28} {value:,}" for key, value in plain.items()]
    for key in ("features_read", "features_left_out"):
        lines.append(f"{key:28} {', '.join(numbers[key]) or 'none'}")
    return "\n".join([*lines, "tables", *(f"  {line}" for line in numbers["tables"])])
