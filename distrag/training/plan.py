"""What a config will do on W ranks, without a process group: steps, balance, padding, memory, placement, traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from distrag.batching.checks import MAX_RANKS
from distrag.batching.nodes import plan_nodes
from distrag.batching.plan import EpochPlan, plan_epoch
from distrag.config import RunConfig, check_number, choose_encoder
from distrag.config.limits import INT32, Range
from distrag.data.schema import Schema
from distrag.data.split import View
from distrag.data.store import Store
from distrag.embedding.planner import RANKS_PER_NODE, ask_planner
from distrag.encoder.padding import Padding, inner_padding
from distrag.problem import problem
from distrag.training.checks import Checked, check_job, check_length
from distrag.training.composition import Walk, padding_shares, recommend, scan_buckets, walk_plan
from distrag.training.cost import Cost, choose_cost, read_cost
from distrag.training.footprint import expect_memory, measure_step
from distrag.training.inputs import build_run_views, choose_features, is_read
from distrag.training.locality import node_options, open_lengths
from distrag.training.traffic import expect_traffic

Ints = np.ndarray[Any, np.dtype[np.int64]]

PLANNER_SECONDS = 15.0
_SCAN_SAMPLES = 4_000_000
_BARS = 14
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Subject:
    """A config that can be trained on `world_size` ranks, and what its plan is made of.

    Attributes:
        config: the run.
        world_size: ranks to plan for.
        ranks_per_node: ranks of a node.
        store: its store, of which only the lengths may be there.
        checked: its choices.
        view: the train samples with the windows of the epoch.
        lengths: of these.
        epoch: which epoch.
        cost: what the plan balances by.
        cost_from: where that comes from, in words.
        device: `cpu` or `cuda`, where the ranks compute as far as is known.
    """

    config: RunConfig
    world_size: int
    ranks_per_node: int
    store: Store
    checked: Checked
    view: View
    lengths: Ints
    epoch: int
    cost: Cost
    cost_from: str
    device: str

    def plan(self, bucket_steps: int | None = None, every: int = 1) -> EpochPlan:
        """Returns the plan of every n-th sample, under the config's budget."""
        batching, lengths = self.config.batching, self.lengths[::every]
        options: dict[str, Any] = {
            "world_size": self.world_size,
            "max_tokens": None if batching.global_tokens else batching.max_tokens,
            "global_tokens": batching.global_tokens,
            "max_samples": batching.max_samples,
            "bucket_steps": bucket_steps or batching.bucket_steps,
            "seed": self.config.train.seed,
            "epoch": self.epoch,
            "cost": self.cost,
        }
        if batching.locality == "global":
            return plan_epoch(lengths, **options)
        num_nodes = self.world_size // self.ranks_per_node
        node_of = node_options(self.config, self.store, None, self.view)["nodes_of"](num_nodes)
        return plan_nodes(lengths, node_of[::every], num_nodes, **options)


def open_subject(config: RunConfig, world_size: int, epoch: int = 0, ranks_per_node: int | None = None) -> Subject:
    """Returns what a plan is made of; refuses what training refuses.

    What a rank may hold is checked where `tables.max_gib_per_rank` says it: the ranks are not this machine.

    Args:
        config: the run.
        world_size: ranks to plan for.
        epoch: which epoch.
        ranks_per_node: ranks of a node; 8, or all where there are fewer.

    Raises:
        ValueError: for a config, store or world size that cannot be trained.
    """
    check_number(world_size, Range(1, MAX_RANKS), "--world-size")
    check_number(epoch, Range(0, INT32), "--epoch")
    per_node = min(RANKS_PER_NODE, world_size) if ranks_per_node is None else ranks_per_node
    check_number(per_node, Range(1, world_size), "--ranks-per-node")
    if world_size % per_node and config.batching.locality == "node":
        todo = "set --ranks-per-node, or batching.locality to global"
        raise problem(
            "Nodes are not alike", got=f"{world_size} ranks, {per_node} a node", wanted="whole nodes", where="--world-size", todo=todo
        )
    store = open_lengths(config)
    limit = int(config.tables.max_gib_per_rank * 2**30) or None
    checked = check_job(config, store.schema, world_size, device=config.train.device, limit_bytes=limit)
    view = build_run_views(config, store, checked.cost)["train"].at_epoch(epoch)
    device = config.train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cost, words = choose_cost(config, checked.cost, read_cost(config.train.run_dir), config.train.device)
    return Subject(config, world_size, per_node, store, checked, view, view.lengths, epoch, cost, words, device)


def plan_run(
    config: RunConfig, world_size: int, epoch: int = 0, *, ranks_per_node: int | None = None, planner_s: float = PLANNER_SECONDS
) -> dict[str, Any]:
    """Returns the plan of an epoch in numbers; refuses what training refuses.

    Where an epoch has more than 256 steps, so many are looked at, in runs of neighbours spread over it.

    Args:
        config: the run.
        world_size: ranks to plan for.
        epoch: which epoch.
        ranks_per_node: ranks of a node; 8, or all where there are fewer.
        planner_s: seconds that TorchRec's planner may take; 0 does not ask it.

    Raises:
        ValueError: for a config, store or world size that cannot be trained.
    """
    check_number(planner_s, Range(0, 1e6), "--planner-seconds")
    subject = open_subject(config, world_size, epoch, ranks_per_node)
    plan, lengths = subject.plan(), subject.lengths
    run_steps = check_length(config, plan.num_steps)
    walk, paddings = walk_plan(plan), find_paddings(subject)
    return {
        "world_size": world_size,
        "epoch": epoch,
        "num_samples": plan.num_samples,
        "num_tokens": plan.num_tokens,
        "num_steps": plan.num_steps,
        "num_steps_of_run": run_steps,
        "num_cut": subject.view.num_cut,
        "cost": list(subject.cost),
        "cost_from": subject.cost_from,
        **walk.numbers(),
        **padding_shares(plan, lengths, paddings),
        **_buckets(subject, paddings),
        **_machines(subject, walk, planner_s),
        "length_histogram": length_histogram(lengths),
        **_features(config, subject.store.schema),
        "tables": [str(placement) for placement in subject.checked.placements],
    }


def find_paddings(subject: Subject) -> dict[str, Padding]:
    """Returns how a padded batch and how the encoder, on CPU and on CUDA, pad."""
    config, inputs = subject.config, subject.checked.inputs
    section: Any = config.encoder
    _, settings = choose_encoder(config)
    joined = config.model.join == "concat" and len(inputs.history_keys) > 1
    common = {"half": config.train.precision == "bf16", "mixed": joined or inputs.num_numbers > 0, "states": config.task == "next_item"}
    inside = {d: inner_padding(section.name, settings, config.model.dim, device=d, **common) for d in _DEVICES}
    return {"padded_batch_padding_share": "rectangle", **{f"encoder_padding_share_{d}": padding for d, padding in inside.items()}}


def _buckets(subject: Subject, paddings: Mapping[str, Padding]) -> dict[str, Any]:
    """Returns padding against mixing for several `bucket_steps`, over every n-th sample of a large view, and which to take."""
    every = max(1, len(subject.view) // _SCAN_SAMPLES)
    lengths = subject.lengths[::every]
    rows = scan_buckets(lambda k: subject.plan(k, every), lengths, paddings, subject.config.batching.bucket_steps)
    names = {device: f"encoder_padding_share_{device}" for device in _DEVICES}
    advice = {device: recommend(rows, name, paddings[name]) for device, name in names.items()}
    return {"buckets": rows, "bucket_steps_advice": {device: {"bucket_steps": k, "why": why} for device, (k, why) in advice.items()}}


def _machines(subject: Subject, walk: Walk, planner_s: float) -> dict[str, Any]:
    """Returns memory, traffic and TorchRec's placement, all for the mean step but for the memory, which is that of the fullest rank."""
    config, checked = subject.config, subject.checked
    tokens, samples = float(walk.tokens.mean()), float(walk.samples.mean())
    ids = ids_per_key(subject, tokens, samples)
    step = measure_step(config, checked, subject.lengths, int(walk.tokens.max(initial=0)))
    sharded = sum(ids[key] for spec in checked.specs if checked.shardings[spec.name] != "replicated" for key in spec.keys)
    prefetch = 0 if config.debug else config.batching.prefetch
    parts = config.batching.micro_batches
    memory = expect_memory(step, checked.placements, walk.tokens, walk.samples, sharded, config.model.dim, prefetch, parts)
    sent = expect_traffic(checked.specs, checked.placements, ids, samples, step.num_dense, subject.world_size)
    traffic = {f"{name}_bytes": float(getattr(sent, name).mean()) for name in ("ids", "vectors", "gradients", "reduced")}
    total = sent.total()
    advice = ask_planner(
        checked.specs,
        config.tables,
        config.model.dim,
        subject.world_size,
        device=subject.device,
        ranks_per_node=subject.ranks_per_node,
        batch_size=max(1, round(samples)),
        pooling_factors={key: max(1e-3, count / max(samples, 1e-9)) for key, count in ids.items()},
        limit_s=planner_s,
    )
    return {
        "memory_per_rank": memory,
        "sent_per_rank_and_step": {**traffic, "total_bytes_mean": float(total.mean()), "total_bytes_max": float(total.max())},
        "torchrec": {"seconds": advice.seconds, "note": advice.note, "tables": [asdict(proposal) for proposal in advice.proposals]},
    }


def ids_per_key(subject: Subject, tokens: float, samples: float) -> dict[str, float]:
    """Returns the ids of a rank in a step for each key of the tables.

    Args:
        subject: what is planned.
        tokens: of the rank in the step.
        samples: the same.
    """
    inputs, loss = subject.checked.inputs, subject.checked.loss
    ids = {**dict.fromkeys(inputs.history_keys, tokens), **dict.fromkeys(inputs.context_keys, samples)}
    if inputs.target:
        ids[f"{inputs.target}:next"] = samples
        draws = getattr(loss, "num_negatives", 0)
        ids[f"{inputs.target}:negative"] = float(draws) if loss.negatives == "shared" else draws * tokens
    return ids


def length_histogram(lengths: Ints) -> list[dict[str, int]]:
    """Returns samples by length, in at most 14 classes: each length where there are few, else classes that grow with the length."""
    if not len(lengths):
        return []
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest - shortest < _BARS:
        edges = np.arange(shortest, longest + 2)
    else:
        above = np.geomspace(max(1, shortest), longest + 1, _BARS).round().astype(np.int64)
        edges = np.unique(np.concatenate([[shortest], above]))
    counts = np.add.reduceat(np.bincount(lengths), edges[:-1])
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return [{"from": low, "to": high - 1, "samples": count} for low, high, count in spans]


def _features(config: RunConfig, schema: Schema) -> dict[str, list[str]]:
    """Returns what the model reads, and what the store has besides."""
    groups = {"history": (config.data.history, schema.history), "context": (config.data.context, schema.context)}
    read = {
        where: [f.name for f in choose_features(names, features, where) if is_read(f, where)] for where, (names, features) in groups.items()
    }
    left = [f"{where} {f.name}" for where, (_, features) in groups.items() for f in features if f.name not in read[where]]
    return {"features_read": [f"{where} {name}" for where, names in read.items() for name in names], "features_left_out": left}
