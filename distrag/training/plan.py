"""What a config will do on W ranks, without a process group: steps, balance, padding, placement."""

from __future__ import annotations

from typing import Any

import numpy as np

from distrag.batching.plan import EpochPlan, plan_epoch
from distrag.config import RunConfig, choose
from distrag.data.split import build_views
from distrag.data.store import open_store
from distrag.embedding.config import build_shardings
from distrag.encoder import ENCODERS
from distrag.training.inputs import build_inputs, build_loss, build_specs


def plan_run(config: RunConfig, world_size: int, epoch: int = 0) -> dict[str, Any]:
    """Returns the plan of an epoch in numbers.

    Args:
        config: the run.
        world_size: ranks to plan for.
        epoch: which epoch.

    Raises:
        ValueError: for a config, store or world size that cannot be planned.
    """
    store = open_store(config.data.path)
    view = build_views(store, config.data.split, task=config.task, max_len=config.data.max_len)["train"]  # type: ignore[arg-type]
    kind, settings = choose(config.encoder, ENCODERS, "encoder")
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
        cost=kind.cost(settings, config.model.dim),
    )
    numbers = {"world_size": world_size, "epoch": epoch, **plan.summary(), "num_cut": view.num_cut}
    return {**numbers, **_per_rank(plan, view.lengths), "tables": _tables(config, store.schema, world_size)}


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


def _tables(config: RunConfig, schema: Any, world_size: int) -> list[str]:
    from distrag.embedding.plan import build_placements

    specs = build_specs(build_inputs(config, schema), schema, build_loss(config).negatives != "none")
    return [str(p) for p in build_placements(specs, build_shardings(specs, config.tables), config.model.dim, world_size, config.tables)]


def describe_plan(numbers: dict[str, Any]) -> str:
    """Returns the numbers of `plan_run` as lines to read."""
    lines = [
        f"{key:28} {value:,.4f}" if isinstance(value, float) else f"{key:28} {value:,}" for key, value in numbers.items() if key != "tables"
    ]
    return "\n".join([*lines, "tables", *(f"  {line}" for line in numbers["tables"])])
