"""From a config to everything a run needs: store, views, model, ranks. Training and evaluation start here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distrag.batching.collate import Collate
from distrag.batching.nodes import NodeSampler
from distrag.batching.sampler import TokenBudgetSampler
from distrag.config import RunConfig
from distrag.data.split import View
from distrag.data.store import Store
from distrag.embedding.plan import Placement
from distrag.embedding.tables import Tables
from distrag.model import Inputs, SequenceModel
from distrag.parallel import Parallel, build_parallel
from distrag.problem import problem
from distrag.training.checks import check_job, check_length
from distrag.training.cost import choose_cost, read_cost
from distrag.training.inputs import build_run_views
from distrag.training.locality import Place, node_options, open_run_store
from distrag.world import World, agreed


@dataclass(frozen=True)
class Job:
    """Everything of a run before its first step.

    Attributes:
        config: the merged config.
        world: the ranks.
        store: the opened store.
        views: train, valid and test.
        inputs: what the model reads of a batch.
        collate: turns sample numbers of a view into a batch.
        placements: where each table lies.
        parallel: the sharded model.
        cost: (a, b, c) of the encoder: a*L + b*L^2 + c for one sequence.
        normalize: items are ranked by cosine.
        place: this rank's node and the rows of all nodes, where a rank takes only samples of its node.
    """

    config: RunConfig
    world: World
    store: Store
    views: dict[str, View]
    inputs: Inputs
    collate: Collate
    placements: list[Placement]
    parallel: Parallel
    cost: tuple[float, float, float]
    normalize: bool
    place: Place | None = None
    cost_from: str = ""

    @property
    def prefetch(self) -> int:
        """Batches that loaders build ahead; none in debug mode, which has no threads."""
        return 0 if self.config.debug else self.config.batching.prefetch

    def node_options(self, part: str) -> dict[str, Any]:
        """Returns what a NodeSampler of a view must know of the nodes."""
        return node_options(self.config, self.store, self.place, self.views[part])


@dataclass(frozen=True)
class Plain:
    """What a job is made of before its model is spread over ranks; attributes as in `Job`.

    Attributes:
        model: an ordinary module on the CPU.
    """

    views: dict[str, View]
    inputs: Inputs
    model: SequenceModel
    placements: list[Placement]
    collate: Collate
    cost: tuple[float, float, float]
    normalize: bool


def build_job(config: RunConfig, world: World, *, fold_valid: bool = False) -> Job:
    """Returns the job of a config on these ranks.

    Args:
        config: the run.
        world: the ranks.
        fold_valid: train on train and valid together.

    Raises:
        ValueError: the same on every rank, before any rank waits for another: bad store, features, sizes or combination.
    """
    limit = _memory_limit(config, world)
    store, place = open_run_store(config, world)
    fitted = world.broadcast_object(world.on_first(lambda: read_cost(config.train.run_dir)))
    plain = agreed(world, lambda: build_plain(config, store, world, limit, fold_valid=fold_valid))
    cost, cost_from = choose_cost(config, plain.cost, fitted, world.device.type)
    parallel = build_parallel(plain.model, plain.placements, world, config.tables, config.optim.table_lr, direct=not config.debug)
    if place is not None:
        plain.collate.count = place.counted(plain.collate.count)
    parts = plain.views, plain.inputs, plain.collate, plain.placements
    return Job(config, world, store, *parts, parallel, cost, plain.normalize, place, cost_from)


def build_plain(config: RunConfig, store: Store, world: World, limit_bytes: int | None, *, fold_valid: bool = False) -> Plain:
    """Returns views, model and batches of a config, nothing of it spread yet; needs no process group.

    Args:
        config: the run.
        store: its store.
        world: the ranks that the tables are placed for.
        limit_bytes: what one rank may hold, in bytes; None does not check it.
        fold_valid: train on train and valid together.

    Raises:
        ValueError: bad features, sizes or combination.
    """
    checked = check_job(config, store.schema, world.size, device=world.device.type, limit_bytes=limit_bytes)
    if config.task == "conversion":
        _check_labels(store)
    views = build_run_views(config, store, checked.cost, fold_valid=fold_valid)
    loss = checked.loss
    tables = Tables(checked.specs, checked.shardings, config.model.dim, init_std=config.tables.init_std, seed=config.train.seed)
    torch.manual_seed(config.train.seed)  # the dense part starts equal on all ranks
    encoder = checked.build_encoder()
    autocast = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.precision]
    model = SequenceModel(config.model, checked.inputs, tables, encoder, loss, seed=config.train.seed, autocast=autocast)
    collate = Collate(
        store,
        config.data,
        task=config.task,
        negatives=loss.negatives,
        num_negatives=getattr(loss, "num_negatives", 0),
        seed=config.train.seed,
        key_order=tables.key_order,
    )
    return Plain(
        {str(part): view for part, view in views.items()},
        checked.inputs,
        model,
        checked.placements,
        collate,
        checked.cost,
        getattr(loss, "normalize", False),
    )


def _check_labels(store: Store) -> None:
    assert store.label is not None, "build_inputs has refused a store without labels"
    bad = np.flatnonzero((store.label != 0) & (store.label != 1))
    if len(bad):
        where, todo = f"{store.path}, label of row {bad[0]}", "give `distrag prepare` a label of 0 and 1, such as rating >= 4"
        raise problem("A label is neither 0 nor 1", got=float(store.label[bad[0]]), wanted="0 or 1", where=where, todo=todo)


def _memory_limit(config: RunConfig, world: World) -> int:
    if config.tables.max_gib_per_rank > 0:
        return int(config.tables.max_gib_per_rank * 2**30)
    return world.free_bytes() // (1 if world.device.type == "cuda" else max(1, world.local_size))


def build_sampler(job: Job) -> TokenBudgetSampler:
    """Returns the sampler of the train view.

    Raises:
        ValueError: a budget that does not fit the histories; the same on every rank.
    """
    batching = job.config.batching
    return agreed(
        job.world,
        lambda: NodeSampler(
            job.views["train"],
            **job.node_options("train"),
            max_tokens=None if batching.global_tokens else batching.max_tokens,
            global_tokens=batching.global_tokens,
            max_samples=batching.max_samples,
            bucket_steps=batching.bucket_steps,
            num_replicas=job.world.size,
            rank=job.world.rank,
            seed=job.config.train.seed,
            cost=job.cost,
            content_hash=job.store.content_hash,
        ),
    )


def count_steps(job: Job, sampler: TokenBudgetSampler) -> int:
    """Returns the global steps that the config asks for: the smaller of `max_steps` and `num_epochs`, of those that are set.

    Raises:
        ValueError: neither is set, or an epoch has no step.
    """
    return check_length(job.config, len(sampler))
