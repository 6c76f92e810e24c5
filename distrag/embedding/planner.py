"""What TorchRec's own planner would do with the tables, to be read beside ours; for any world size and without a process group."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    Topology,
    TopologyFactory,
    TrainerConfig,
)

from distrag.embedding.config import TablesConfig, TableSpec
from distrag.embedding.plan import attach_table_optimizer

RANKS_PER_NODE = 8
"""Of a node where nobody says it: the planner weighs links inside a node against links between nodes."""
_SECONDS = 6e-4  # that it takes a rank and table, measured


@dataclass(frozen=True)
class Proposal:
    """What the planner proposes for one table.

    Attributes:
        table: its name.
        sharding: `row_wise`, `table_wise`, `column_wise` or `data_parallel`, which distrag calls replicated.
        ranks: where it lies.
    """

    table: str
    sharding: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        where = f"{len(self.ranks)} ranks" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        return f"{self.table}: {self.sharding} on {where}"


@dataclass(frozen=True)
class Advice:
    """The planner's answer.

    Attributes:
        proposals: one a table; empty where it had no answer.
        note: why it had none, or nothing.
        seconds: how long it took.
    """

    proposals: tuple[Proposal, ...]
    note: str
    seconds: float


class _TooLong(Exception):
    """The planner's time is over."""


class _Enumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's enumerator, which rates shards of one size once, and stops between two ways of sharding when its time is over.

    Rating takes 1 ms a shard, and a table cut over 4,096 ranks has two sizes of shard.
    """

    deadline = float("inf")

    def populate_estimates(self, sharding_options: list[Any]) -> None:
        """Rates every option.

        Raises:
            _TooLong: the deadline has passed.
        """
        for option in sharding_options:
            if time.monotonic() > self.deadline:
                raise _TooLong
            shards = option.shards
            alike = {tuple(shard.size): shard for shard in reversed(shards)}
            option.shards = list(alike.values())
            super().populate_estimates([option])
            for shard in shards:
                rated = alike[tuple(shard.size)]
                shard.perf, shard.storage = rated.perf, rated.storage
            option.shards = shards


def ask_planner(
    specs: Sequence[TableSpec],
    config: TablesConfig,
    dim: int,
    world_size: int,
    *,
    device: str,
    ranks_per_node: int = RANKS_PER_NODE,
    batch_size: int,
    pooling_factors: Mapping[str, float],
    limit_s: float = 15.0,
) -> Advice:
    """Returns what TorchRec's planner proposes for the tables on `world_size` ranks.

    It may choose among what distrag can run: the fused kernel for sharded tables, data_parallel for replicated ones. Its time grows with
    ranks times tables: three tables took 0.06 s on 64 ranks, 1.3 s on 1,024 and 7 s on 4,096. What would take longer than `limit_s` is not
    tried, and what takes longer all the same is stopped at the next pause that it makes.

    Args:
        specs: the tables.
        config: optimizer and limit of memory.
        dim: width of every table.
        world_size: ranks to place them on.
        device: `cpu` or `cuda`.
        ranks_per_node: ranks of a node.
        batch_size: samples of a rank in a step.
        pooling_factors: ids that a sample has for each key; TorchRec would take 1.
        limit_s: seconds; 0 does not ask.
    """
    started = time.monotonic()
    expected_s = _SECONDS * world_size * len(specs)
    if expected_s > limit_s:
        todo = f"about {expected_s:.0f} s for {len(specs)} tables on {world_size:,} ranks: give it --planner-seconds {1.5 * expected_s:.0f}"
        return Advice((), f"not asked, it would take {todo}" if limit_s > 0 else "not asked", 0.0)
    kinds = ["row_wise", "table_wise", "data_parallel"]
    if config.optimizer != "rowwise_adagrad" and dim % 4 == 0:
        kinds.append("column_wise")
    constraints = {
        spec.name: ParameterConstraints(
            sharding_types=kinds, compute_kernels=["fused", "dense"], pooling_factors=[float(pooling_factors[key]) for key in spec.keys]
        )
        for spec in specs
    }
    try:
        with _quiet():
            topology = _topology(config, world_size, device, ranks_per_node)
            planner = _planner(topology, batch_size, constraints, limit_s)
            plan = planner.plan(_collection(specs, config, dim, device), [EmbeddingCollectionSharder()])
    except _TooLong:
        took = time.monotonic() - started
        return Advice(
            (), f"stopped after {took:.1f} s without an answer: ask again with --planner-seconds {4 * max(limit_s, took):.0f}", took
        )
    except PlannerError as error:
        return Advice((), "it refuses: " + " ".join(str(error).split())[:300], time.monotonic() - started)
    (module,) = plan.plan.values()
    proposals = [Proposal(name, its.sharding_type, tuple(its.ranks or range(world_size))) for name, its in module.items()]
    return Advice(tuple(proposals), "", time.monotonic() - started)


def _collection(specs: Sequence[TableSpec], config: TablesConfig, dim: int, device: str) -> EmbeddingCollection:
    tables = [EmbeddingConfig(name=s.name, num_embeddings=s.num_rows, embedding_dim=dim, feature_names=list(s.keys)) for s in specs]
    collection = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    attach_table_optimizer(collection, config, 0.1, device)  # the planner counts its state
    return collection


def _topology(config: TablesConfig, world_size: int, device: str, ranks_per_node: int = RANKS_PER_NODE) -> Topology:
    limit = int(config.max_gib_per_rank * 2**30) or None
    caps = {"hbm_cap_bytes" if device == "cuda" else "ddr_cap_bytes": limit}
    trainer = TrainerConfig(world_size=world_size, local_world_size=min(world_size, ranks_per_node), **caps)
    return TopologyFactory.create_topology(trainer_config=trainer, kernel_config=KernelConfig(compute_device=device))


def _planner(topology: Topology, batch_size: int, constraints: dict[str, Any], limit_s: float) -> EmbeddingShardingPlanner:
    enumerator = _Enumerator(topology=topology, batch_size=batch_size, constraints=constraints)
    enumerator.deadline = time.monotonic() + limit_s / 2
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        # without the grid search, which tries up to 10,000 plans
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        stats=NoopEmbeddingStats(),
        debug=False,
        timeout_seconds=max(1, round(limit_s / 2)),  # of its second half, which compares proposals; then the best so far is taken
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the planner's log lines off the screen: it warns of its own data_parallel tables, and logs what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
