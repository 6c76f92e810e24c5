"""Evaluates a model on a held-out view, on all ranks at once, with numbers that do not depend on how many there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from distrag.batching.loader import Loader
from distrag.batching.nodes import NodeSampler
from distrag.batching.sampler import TokenBudgetSampler
from distrag.evaluate import BinaryEvaluator, Catalogue, HeldOut, RankingEvaluator, build_catalogue
from distrag.training.build import Job

Metrics = dict[str, int | float | None]


def evaluate_view(job: Job, part: str, pause: Callable[[], None] = lambda: None) -> Metrics:
    """Returns the metrics of the `valid` or `test` view. A collective: every rank calls it.

    next_item: HR, NDCG and MRR of ranking all items, seen ones removed. conversion: AUC, log loss, NE, group AUC.

    Args:
        job: the run.
        part: `valid` or `test`.
        pause: called between batches, on every rank after the same ones; it may raise, which ends the evaluation.
    """
    was_training = job.parallel.model.training
    job.parallel.model.eval()
    try:
        with torch.no_grad():
            return _rank(job, part, pause) if job.config.task == "next_item" else _classify(job, part, pause)
    finally:
        job.parallel.model.train(was_training)


def _sampler(job: Job, part: str) -> TokenBudgetSampler:
    batching, world = job.config.batching, job.world
    # Order is free here, so like lengths share a step: encoders that pad inside then pad little.
    return NodeSampler(
        job.views[part],
        **job.node_options(part),
        max_tokens=max(batching.max_tokens or 0, job.config.data.max_len, 4096),
        num_replicas=world.size,
        rank=world.rank,
        shuffle=False,
        cost=job.cost,
        bucket_steps=16,
    )


def _rank(job: Job, part: str, pause: Callable[[], None]) -> Metrics:
    view, world, inputs = job.views[part], job.world, job.inputs
    own = None if job.place is None else job.place.owns(view)
    held_out = HeldOut.of(view, job.store.position(inputs.target), own)
    evaluator = RankingEvaluator(world, _catalogue(job), held_out, job.config.train.eval_ks)
    sampler = _sampler(job, part)
    for batch in Loader(job.collate, view, sampler, device=world.device, prefetch=job.prefetch, training=False):
        queries = job.parallel.plain.query(batch)[batch.samples >= 0]
        evaluator.add(queries, [sampler.plan.samples(batch.step, rank) for rank in range(world.size)])
        pause()
    return dict(evaluator.result())


def _catalogue(job: Job) -> Catalogue:
    shards = job.parallel.item_shards(job.inputs.target_table)
    catalogue = build_catalogue(job.world, shards, job.inputs.num_items, job.config.model.dim)
    if not job.normalize:
        return catalogue
    # Only here are rows whole: a column-wise shard does not know the norm of its rows.
    blocks = tuple((row, torch.nn.functional.normalize(rows, dim=1)) for row, rows in catalogue.blocks)
    return dataclasses.replace(catalogue, blocks=blocks)


def _classify(job: Job, part: str, pause: Callable[[], None]) -> Metrics:
    evaluator = BinaryEvaluator(job.world)
    groups = job.store.key
    view = job.views[part]
    for batch in Loader(job.collate, view, _sampler(job, part), device=job.world.device, prefetch=job.prefetch, training=False):
        owner = None if groups is None else torch.from_numpy(groups[view.rows[batch.samples.cpu().numpy()]].astype(np.int64))
        evaluator.add(batch.samples, job.parallel.plain.predict(batch), batch.labels, batch.weights, owner)
        pause()
    return dict(evaluator.result())


def choose_metric(job: Job) -> str:
    """Returns the name of the metric that early stopping watches."""
    ks = job.config.train.eval_ks
    default = "auc" if job.config.task == "conversion" else f"ndcg@{10 if 10 in ks else max(ks)}"
    return job.config.train.metric or default
