"""Where each sharded table lies: a TorchRec sharding plan that every rank computes alike, with no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distrag.embedding.config import TablesConfig, TableSpec, check_optimizer, check_widths
from distrag.problem import problem

_GIB = 1024**3


@dataclass(frozen=True)
class Placement:
    """One line of the printed plan: a table, how it is kept, where, and what it costs a rank."""

    table: str
    num_rows: int
    dim: int
    sharding: str
    ranks: tuple[int, ...]
    bytes_per_rank: int

    def __str__(self) -> str:
        where = f"ranks {self.ranks[0]}-{self.ranks[-1]}" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        size = f"{self.bytes_per_rank / 2**20:.1f} MiB a rank with optimizer state"
        return f"{self.table}: {self.num_rows} x {self.dim}, {self.sharding} on {where}, {size}"


def build_placements(
    specs: Sequence[TableSpec], shardings: dict[str, str], dim: int, world_size: int, config: TablesConfig
) -> list[Placement]:
    """Returns where every table lies for `world_size` ranks; needs no process group.

    table_wise tables go, largest first, to the rank that holds the fewest bytes so far.

    Raises:
        ValueError: a width that a sharded table cannot have on so many ranks.
    """
    check_widths(shardings, dim, world_size)
    load = [0] * world_size
    out: list[Placement] = []
    for spec in sorted(specs, key=lambda s: (-s.num_rows, s.name)):
        kind = shardings[spec.name]
        size = _bytes(spec.num_rows, dim, kind, config)
        ranks = (load.index(min(load)),) if kind == "table_wise" else tuple(range(world_size))
        share = -(-size // world_size) if kind in ("row_wise", "column_wise") else size
        for rank in ranks:
            load[rank] += share
        out.append(Placement(spec.name, spec.num_rows, dim, kind, ranks, share))
    return out


def _bytes(num_rows: int, dim: int, kind: str, config: TablesConfig) -> int:
    optimizer = config.replicated_optimizer if kind == "replicated" else config.optimizer
    # values a row beside the weights; a replicated table has a dense gradient too
    state = {"rowwise_adagrad": 1, "adagrad": dim, "sgd": 0, "adam": 2 * dim}[optimizer] + (dim if kind == "replicated" else 0)
    return num_rows * (dim + state) * 4


def check_memory(placements: Sequence[Placement], world_size: int, limit_bytes: int) -> None:
    """Refuses a plan that does not fit, with the same message on every rank.

    Args:
        placements: from `build_placements`.
        world_size: number of ranks.
        limit_bytes: what one rank may hold, in bytes.

    Raises:
        ValueError: naming the tables, their sizes and the limit.
    """
    load = [sum(p.bytes_per_rank for p in placements if rank in p.ranks) for rank in range(world_size)]
    worst = max(range(world_size), key=load.__getitem__)
    if load[worst] <= limit_bytes:
        return
    raise problem(
        "The tables do not fit",
        got=f"{load[worst] / _GIB:.3g} GiB on rank {worst}: " + "; ".join(str(p) for p in placements if worst in p.ranks),
        wanted=f"at most {limit_bytes / _GIB:.3g} GiB a rank",
        where="tables",
        todo="use more ranks, a smaller model.dim, hashed tables with fewer buckets, or raise --tables.max_gib_per_rank",
    )


def build_plan(
    module_path: str, collection: EmbeddingCollection, placements: Sequence[Placement], world_size: int, local_size: int, device: str
) -> ShardingPlan:
    """Returns TorchRec's plan for the sharded collection.

    Args:
        module_path: where the collection hangs in the model, such as `tables.sharded`.
        collection: the plain collection, its table optimizer already attached.
        placements: from `build_placements`.
        world_size: number of ranks.
        local_size: ranks of one host.
        device: `cpu` or `cuda`.
    """
    generators = {}
    for placement in placements:
        # On one rank a row-wise table is one whole shard; kept table-wise it skips two permutations a step.
        if placement.sharding == "row_wise" and world_size > 1:
            generators[placement.table] = row_wise(compute_kernel="fused")
        elif placement.sharding in ("row_wise", "table_wise"):
            generators[placement.table] = table_wise(placement.ranks[0], compute_kernel="fused")
        elif placement.sharding == "column_wise":
            generators[placement.table] = column_wise(list(placement.ranks), compute_kernel="fused")
    names = [config.name for config in collection.embedding_configs()]
    plan: EmbeddingModuleShardingPlan = construct_module_sharding_plan(
        collection, {name: generators[name] for name in names}, EmbeddingCollectionSharder(), local_size, world_size, device
    )
    return ShardingPlan(plan={module_path: plan})


def attach_table_optimizer(collection: nn.Module, config: TablesConfig, lr: float, device: str) -> None:
    """Attaches the fused optimizer to the tables; must run before sharding, else TorchRec picks SGD at 0.01.

    Raises:
        ValueError: an optimizer that does not exist, or not on this device.
    """
    check_optimizer(config, device)
    optimizers: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
        "rowwise_adagrad": (RowWiseAdagrad, {"lr": lr, "eps": config.eps}),
        "adagrad": (torch.optim.Adagrad, {"lr": lr, "eps": config.eps}),
        "sgd": (torch.optim.SGD, {"lr": lr}),
        "adam": (torch.optim.Adam, {"lr": lr, "eps": config.eps}),
    }
    kind, arguments = optimizers[config.optimizer]
    apply_optimizer_in_backward(kind, collection.parameters(), arguments)
