"""A run goes on with other ranks and another sharding; `python -m tests.training.reshard` tries all pairs.

The smallest case has numbers that can be told in advance: a table of four rows, a gradient of one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from distrag.checkpoint import load_checkpoint, save_checkpoint
from distrag.embedding.config import TablesConfig, TableSpec
from distrag.parallel import Parallel
from distrag.world import World
from tests.embedding.test_tables import full_tables, jagged, shard
from tests.ranks import run_ranks
from tests.training.reshard import ADAGRAD, STEPS, Case, is_good, kept, move, read_tensors
from tests.training.runs import write_histories

SPECS = [TableSpec("item", 4, ("item",))]


@pytest.mark.parametrize(
    "case",
    [
        Case((2, kept("row_wise")), (3, kept("table_wise"))),
        Case((1, kept("row_wise")), (2, kept("column_wise")), ADAGRAD),
        Case((2, kept("table_wise")), (2, kept("replicated")), ADAGRAD),
        Case((2, kept("row_wise")), (1, kept("replicated")), anew=True),
    ],
    ids=str,
)
def test_another_layout_has_the_same_weights_and_states_and_the_next_losses(tmp_path: Path, case: Case) -> None:
    off = move(case, write_histories(tmp_path / "store"), tmp_path)
    assert is_good(case, off), off
    assert bool(off["lost_states"]) == case.anew
    assert STEPS > 4, "the warm-up is over"


def step_once(config: TablesConfig) -> tuple[Parallel, CombinedOptimizer, World]:
    """Builds a table of zeros under an optimizer; one step with ids 0 and 3 is a gradient of one for each of their values."""
    dmp = shard(config, dim=4, lr=1.0, specs=SPECS)
    dense = {name: parameter for name, parameter in dmp.named_parameters() if "replicated" in name}
    parts = [("tables", dmp.fused_optimizer)]
    if dense:
        parts.append(("replicated", KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=1.0))))
    rank, size = dist.get_rank(), dist.get_world_size()
    return Parallel(dmp, dmp.module, dense, config.optimizer), CombinedOptimizer(parts), World(rank, size, rank, size, torch.device("cpu"))


def train(parallel: Parallel, optimizer: CombinedOptimizer, world: World) -> None:
    ids = [[0, 3]] if world.rank == 0 else [[]]
    optimizer.zero_grad()
    out = parallel.model(jagged({"item": ids}, ["item"]))["item"]
    (out.sum() * world.size).backward()
    optimizer.step()


def zero(module: nn.Module) -> None:
    with torch.no_grad():
        for value in module.state_dict().values():
            for piece in [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]:
                piece.zero_()


@pytest.mark.parametrize(
    ("before", "after"), [((2, "row_wise"), (1, "row_wise")), ((2, "row_wise"), (2, "table_wise")), ((1, "row_wise"), (2, "row_wise"))]
)
def test_rows_and_accumulators_of_a_small_table_are_the_numbers_they_must_be(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    def save(sharding: str) -> None:
        parallel, optimizer, world = step_once(TablesConfig(shard_rows=1, sharding=sharding))
        zero(parallel.model)
        train(parallel, optimizer, world)
        save_checkpoint(tmp_path / "one", parallel, optimizer, {}, world)
        train(parallel, optimizer, world)
        save_checkpoint(tmp_path / "two", parallel, optimizer, {}, world)

    def load(sharding: str) -> None:
        parallel, optimizer, world = step_once(TablesConfig(shard_rows=1, sharding=sharding))
        load_checkpoint(tmp_path / "one", parallel, optimizer, world)
        save_checkpoint(tmp_path / "again", parallel, optimizer, {}, world)
        train(parallel, optimizer, world)
        save_checkpoint(tmp_path / "on", parallel, optimizer, {}, world)

    run_ranks(save, *before)
    run_ranks(load, *after)
    tensors = read_tensors(tmp_path / "again")
    assert tensors["model.tables.item.weight"][:, 0].tolist() == pytest.approx([-1, 0, 0, -1], abs=1e-6)
    assert tensors["optim.tables.item.weight.rowwise_adagrad.sum"].tolist() == [1, 0, 0, 1]
    assert tensors.keys() == read_tensors(tmp_path / "on").keys()
    for name, value in read_tensors(tmp_path / "two").items():
        torch.testing.assert_close(read_tensors(tmp_path / "on")[name], value, rtol=0, atol=1e-6)


def test_a_replicated_table_takes_over_rows_and_starts_another_optimizer_anew(tmp_path: Path) -> None:
    def save() -> None:
        parallel, optimizer, world = step_once(TablesConfig(shard_rows=1))
        zero(parallel.model)
        train(parallel, optimizer, world)
        save_checkpoint(tmp_path / "one", parallel, optimizer, {}, world)

    def load() -> list[float]:
        parallel, optimizer, world = step_once(TablesConfig(shard_rows=1000))
        load_checkpoint(tmp_path / "one", parallel, optimizer, world)
        assert float(optimizer.state_dict()["state"]["replicated.tables.replicated.embeddings.item.weight"]["sum"].abs().max()) == 0
        return next(iter(full_tables(parallel.model).values()))[:, 0].tolist()

    run_ranks(save, 2)
    for rows in run_ranks(load, 2):
        assert rows == pytest.approx([-1, 0, 0, -1], abs=1e-6)
