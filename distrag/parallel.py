"""The only file that shards: a plain model in, a DistributedModelParallel out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import BoundsCheckMode, ShardingEnv, ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from distrag.embedding.config import TablesConfig
from distrag.embedding.cpu_kernel import replace_cpu_kernels
from distrag.embedding.direct import skip_exchange
from distrag.embedding.plan import Placement, attach_table_optimizer, build_plan
from distrag.model import SequenceModel
from distrag.world import World


@dataclass(frozen=True)
class Parallel:
    """A model spread over the ranks.

    Attributes:
        model: the DistributedModelParallel; call it with a RaggedBatch.
        plain: the module inside it, for `predict` and `query`.
        dense: parameters of the dense part and of replicated tables, by name.
        table_optimizer: name of the sharded tables' optimizer.
    """

    model: DistributedModelParallel
    plain: SequenceModel
    dense: dict[str, nn.Parameter]
    table_optimizer: str

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients of the dense part are summed on this rank and not over the ranks."""
        return self.model._dmp_wrapped_module.no_sync()  # type: ignore[no-any-return]

    def set_updates(self, number: int) -> None:
        """Tells fused optimizers how many steps the tables have taken. FBGEMM counts lookups, those of evaluations and skipped steps too.

        Only Adam (CUDA) reads it, to correct its moments.
        """
        for group in self._counting:
            group.iter_cpu.fill_(number)
            group.iter.fill_(number)

    @cached_property
    def _counting(self) -> list[Any]:
        # TorchRec keeps its lookups in a plain list, out of sight of modules()
        lookups = [lookup for module in self.model.modules() for lookup in getattr(module, "_lookups", [])]
        groups = [module for lookup in lookups for module in lookup.modules() if hasattr(module, "iter_cpu")]
        return [group for group in groups if getattr(group.optimizer, "name", "") == "ADAM"]

    def item_shards(self, table: str) -> list[tuple[int, int, torch.Tensor]]:
        """Returns this rank's pieces of a table: (first row, first column, float32 `[rows, columns]`)."""
        tables = self.plain.tables
        if tables.replicated is not None and table in tables.replicated.embeddings:
            return [(0, 0, tables.replicated.embeddings[table].weight.detach())]
        assert tables.sharded is not None, f"no table {table!r}"
        value = tables.sharded.state_dict()[f"embeddings.{table}.weight"]
        return [(*piece.metadata.shard_offsets, piece.tensor.detach()) for piece in value.local_shards()]


def build_parallel(
    model: SequenceModel, placements: Sequence[Placement], world: World, tables: TablesConfig, table_lr: float, *, direct: bool = True
) -> Parallel:
    """Returns the model sharded by `placements`, its dense part under DDP.

    Args:
        model: the plain model on CPU, with real weights.
        placements: from `embedding.plan.build_placements`.
        world: the ranks.
        tables: optimizer and kernel of sharded tables.
        table_lr: learning rate of sharded tables.
        direct: a world of one rank on CPU reads its tables in place; False exchanges with itself, as many ranks do (debug mode).
    """
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of TorchRec's own use of it, once a rank
    plan = ShardingPlan(plan={})
    device = world.device.type
    if model.tables.sharded is not None:
        attach_table_optimizer(model.tables.sharded, tables, table_lr, device)
        plan = build_plan("tables.sharded", model.tables.sharded, placements, world.size, world.local_size, device)
    # Sharded tables stay on the CPU until their rows are dealt out: a GPU never holds a whole one.
    for name, module in (*model.named_children(), *((f"tables.{n}", m) for n, m in model.tables.named_children())):
        if name not in ("tables", "tables.sharded"):
            module.to(world.device)
    dmp = distribute(model, plan, world.device)
    if device == "cpu" and tables.cpu_kernel == "numba" and model.tables.sharded is not None:
        replace_cpu_kernels(dmp, tables.optimizer)
        if world.size == 1 and direct:
            skip_exchange(dmp)
    flags = dmp.module.tables.boundary.flags
    dense = {name: parameter for name, parameter in in_backward_optimizer_filter(dmp.named_parameters()) if parameter is not flags}
    return Parallel(dmp, dmp.module, dense, tables.optimizer)


def distribute(model: nn.Module, plan: ShardingPlan, device: torch.device) -> DistributedModelParallel:
    """Returns `model` with the planned tables sharded over the default process group and the rest under DDP.

    Args:
        model: the plain module, on `device`.
        plan: from `embedding.plan.build_plan`; what it does not name stays replicated.
        device: where this rank computes.
    """
    # Out-of-range ids must raise: in the default mode they train another row without a word.
    sharder = EmbeddingCollectionSharder(fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # TorchRec's call, not ours
        # A static graph, TorchRec's choice, would forbid a first step in several parts.
        dense = DefaultDataParallelWrapper(static_graph=False)
        return DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=[sharder], data_parallel_wrapper=dense)
