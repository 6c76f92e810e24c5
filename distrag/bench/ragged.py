"""distrag's side of the bench: the very path that `distrag train` takes, on one rank, from a store on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrag.batching.loader import Loader
from distrag.batching.sampler import TokenBudgetSampler
from distrag.config import RunConfig, read_config
from distrag.data.write import write_store
from distrag.training.build import build_job
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.step import train_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from distrag.batch import RaggedBatch
    from distrag.bench.histories import BenchData
    from distrag.bench.shape import ModelShape
    from distrag.training.build import Job
    from distrag.world import World


def write_histories(data: BenchData, path: Path) -> None:
    """Writes the histories as a store with the id feature `item` and a label."""
    write_store(path, history={"item": data.items}, offsets=data.offsets, label=data.labels, tables={"item": data.num_rows})


def bench_config(store: Path, encoder: str, batch_size: int, shape: ModelShape) -> RunConfig:
    """Returns the run that trains `batch_size` samples a step on one rank, the item table in the fused row-wise Adagrad kernel."""
    settings: dict[str, Any] = {"name": encoder}
    if encoder in ("gru", "self_attention"):
        settings |= {"num_layers": shape.num_layers, "dropout": shape.dropout if encoder == "self_attention" else 0.0}
    if encoder == "self_attention":
        settings |= {"num_heads": shape.num_heads, "activation": shape.activation, "ffn_factor": 4.0}
    sections: dict[str, Any] = {
        "task": "conversion",
        "data": {"path": str(store), "max_len": shape.max_len, "split": {"kind": "row", "valid_share": 0.0, "test_share": 0.0}},
        "batching": {"max_tokens": batch_size * shape.max_len, "max_samples": batch_size, "prefetch": 0},
        "model": {"dim": shape.dim, "head_hidden": [64]},
        "encoder": settings,
        "tables": {"shard_rows": 1, "optimizer": "rowwise_adagrad"},
        "train": {"device": "cpu"},
    }
    return read_config(sections)


def build_batches(job: Job) -> Loader:
    """Returns the loader over the train view in planned steps, as training builds it."""
    view, batching = job.views["train"], job.config.batching
    sampler = TokenBudgetSampler(
        view,
        max_tokens=batching.max_tokens,
        max_samples=batching.max_samples,
        num_replicas=job.world.size,
        rank=job.world.rank,
        cost=job.cost,
    )
    return Loader(job.collate, view, sampler, device=job.world.device, prefetch=batching.prefetch, training=True)


class RaggedSide:
    """Trains a job step by step.

    Args:
        config: from `bench_config`.
        world: the one rank.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.world, self.job = world, build_job(config, world)
        self.optimizer = build_optimizer(self.job.parallel, config.optim, config.tables)
        self.schedule = Schedule(self.optimizer, config.optim, 10**9)
        self.loader = build_batches(self.job)
        self.batches = _forever(self.loader)
        self.job.parallel.model.train()
        self.num_steps = 0

    def step(self) -> int:
        """Trains on the next batch; returns its tokens."""
        batch = next(self.batches)
        self.schedule.set(self.num_steps)
        train_step(self.job.parallel, self.optimizer, batch, self.world)
        self.num_steps += 1
        return batch.num_tokens

    def count_parameters(self) -> int:
        """Returns the number of weights, tables included."""
        tables: list[torch.Tensor] = [shard for _, _, shard in self.job.parallel.item_shards("item")]
        return sum(p.numel() for p in self.job.parallel.dense.values()) + sum(t.numel() for t in tables)


class RaggedLoading:
    """Builds RaggedBatches and throws them away; each epoch is planned anew inside the clock.

    Args:
        loader: from `build_batches`.
    """

    def __init__(self, loader: Loader) -> None:
        self.batches = _forever(loader)

    def step(self) -> int:
        """Builds the next batch; returns its tokens."""
        return next(self.batches).num_tokens


def _forever(loader: Loader) -> Iterator[RaggedBatch]:
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
