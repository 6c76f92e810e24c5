"""Tables: shardings that are refused or chosen, starts that do not depend on ranks, values at W ranks equal to one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distrag.embedding.config import TablesConfig, TableSpec, build_shardings
from distrag.embedding.plan import attach_table_optimizer, build_placements, build_plan, check_memory
from distrag.embedding.tables import Tables
from tests.ranks import run_ranks

SPECS = [TableSpec("item", 50, ("item", "item:next")), TableSpec("kind", 5, ("kind",))]


def shard(config: TablesConfig, dim: int = 8, lr: float = 0.5, specs: list[TableSpec] = SPECS, numba: bool = True) -> nn.Module:
    from torchrec.distributed.types import ShardingPlan

    from distrag.embedding.cpu_kernel import replace_cpu_kernels
    from distrag.parallel import distribute

    shardings = build_shardings(specs, config)
    model = nn.Module()
    model.tables = Tables(specs, shardings, dim, init_std=1.0, seed=3)
    model.forward = lambda ids: model.tables(ids)
    plan = ShardingPlan(plan={})
    if model.tables.sharded is not None:
        attach_table_optimizer(model.tables.sharded, config, lr, "cpu")
        placements = build_placements(specs, shardings, dim, dist.get_world_size(), config)
        plan = build_plan("tables.sharded", model.tables.sharded, placements, dist.get_world_size(), dist.get_world_size(), "cpu")
    dmp = distribute(model, plan, torch.device("cpu"))
    if numba:
        replace_cpu_kernels(dmp, config.optimizer)
    return dmp


def jagged(keys: dict[str, list[list[int]]], order: list[str]):
    from torchrec import KeyedJaggedTensor

    rows = [row for key in order for row in keys[key]]
    values = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
    return KeyedJaggedTensor(keys=order, values=values, lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64))


def full_tables(dmp: nn.Module) -> dict[str, np.ndarray]:
    out = {}
    for name, value in dmp.state_dict().items():
        if hasattr(value, "local_shards"):
            whole = torch.zeros(value.metadata().size)
            for piece in value.local_shards():
                (row, col), (rows, cols) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
                whole[row : row + rows, col : col + cols] = piece.tensor
            dist.all_reduce(whole)
            value = whole
        out[name.removeprefix("module.")] = value.detach().clone().numpy()
    return out


BATCHES = {
    1: [{"item": [[1, 2, 2, 49], [], [2]], "item:next": [[3], [4], [49]], "kind": [[0, 1, 2, 4], [], [3]]}],
    2: [
        {"item": [[1, 2, 2, 49], []], "item:next": [[3], [4]], "kind": [[0, 1, 2, 4], []]},
        {"item": [[2]], "item:next": [[49]], "kind": [[3]]},
    ],
    3: [
        {"item": [[1, 2, 2, 49], []], "item:next": [[3], [4]], "kind": [[0, 1, 2, 4], []]},
        {"item": [[]], "item:next": [[]], "kind": [[]]},
        {"item": [[2]], "item:next": [[49]], "kind": [[3]]},
    ],
}


def train_some(config: TablesConfig, numba: bool = True) -> dict[str, np.ndarray]:
    dmp = shard(config, numba=numba)
    order = dmp.module.tables.key_order
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD([p for n, p in dmp.named_parameters() if "replicated" in n] or [nn.Parameter(torch.zeros(1))], lr=0.5)
    for _step in range(4):
        out = dmp(jagged(BATCHES[world][rank], order))
        optimizer.zero_grad()
        (sum((v.sin() * v).sum() for v in out.values()) * world / 5.0).backward()
        optimizer.step()
    return full_tables(dmp)


EXACT = [
    TablesConfig(shard_rows=1, sharding=sharding, optimizer=optimizer)
    for sharding in ("row_wise", "table_wise", "column_wise")
    for optimizer in ("rowwise_adagrad", "adagrad", "sgd")
    if (sharding, optimizer) != ("column_wise", "rowwise_adagrad")
]


def train_all(numba: bool = True) -> list[dict[str, np.ndarray]]:
    world = dist.get_world_size()
    return [train_some(config, numba) for config in EXACT if config.sharding != "column_wise" or 8 % world == 0]


def test_any_world_size_trains_the_same_tables_with_repeated_ids_and_empty_ranks() -> None:
    one = run_ranks(train_all, 1)[0]
    for world in (2, 3):
        for ranks in run_ranks(train_all, world):
            for config, tables, expected in zip(EXACT, ranks, one, strict=False):
                for name, values in expected.items():
                    np.testing.assert_allclose(tables[name], values, rtol=0, atol=1e-6, err_msg=f"{name}, {config}, {world} ranks")


def test_the_fast_kernel_and_the_library_s_own_train_the_same_tables() -> None:
    start = run_ranks(lambda: full_tables(shard(TablesConfig(shard_rows=1))), 1)[0]
    ours, theirs = run_ranks(train_all, 2)[0], run_ranks(train_all, 2, False)[0]
    for mine, expected in zip(ours, theirs, strict=True):
        for name, values in expected.items():
            np.testing.assert_allclose(mine[name], values, rtol=0, atol=1e-6)
            assert np.abs(values - start[name]).max() > 1e-3, "the steps moved the table"


def test_column_wise_with_row_wise_adagrad_is_refused_because_it_is_other_mathematics() -> None:
    with pytest.raises(ValueError, match="column_wise keeps one row-wise Adagrad state per shard"):
        build_shardings(SPECS, TablesConfig(shard_rows=1, sharding="column_wise"))


@pytest.mark.parametrize("shard_rows", [1, 10, 1000])
def test_lookup_never_sums_a_sequence_and_starts_equal_on_all_ranks(shard_rows: int) -> None:
    def look() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        dmp = shard(TablesConfig(shard_rows=shard_rows))
        out = dmp(jagged({"item": [[0, 2], []], "item:next": [[1], [1]], "kind": [[4, 4], []]}, dmp.module.tables.key_order))
        return {key: value.detach().numpy() for key, value in out.items()}, full_tables(dmp)

    expected = run_ranks(look, 1)[0][1]
    for world in (1, 2):
        for found, tables in run_ranks(look, world):
            for name, values in expected.items():
                np.testing.assert_array_equal(tables[name], values)
            item = next(v for k, v in expected.items() if k.endswith("item.weight"))
            np.testing.assert_array_equal(found["item"], item[[0, 2]])
            assert found["kind"].shape == (2, 8)


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("bad", [-1, -2, 50])
def test_an_id_outside_its_table_is_refused_not_repaired(bad: int, numba: bool) -> None:
    def look() -> str:
        dmp = shard(TablesConfig(shard_rows=10), numba=numba)
        try:
            dmp(jagged({"item": [[1, bad]], "item:next": [[1]], "kind": [[1, 2]]}, dmp.module.tables.key_order))
        except (ValueError, RuntimeError, IndexError) as error:
            return str(error)
        return ""

    message = run_ranks(look, 1)[0]
    assert message
    if numba:
        assert str(bad) in message
        assert "position 1" in message


def test_a_plan_that_does_not_fit_names_tables_sizes_and_limit_before_anything_is_built() -> None:
    config = TablesConfig()
    specs = [TableSpec("huge", 10**9, ("huge",)), TableSpec("small", 10, ("small",))]
    placements = build_placements(specs, build_shardings(specs, config), 128, 2, config)
    with pytest.raises(ValueError, match=r"(?s)The tables do not fit.*huge: 1000000000 x 128.*at most 1 GiB"):
        check_memory(placements, 2, 2**30)
    check_memory(placements, 2, 2**40)


def test_unknown_tables_and_shardings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)A table that does not exist.*itme"):
        build_shardings(SPECS, TablesConfig(per_table={"itme": "row_wise"}))
    with pytest.raises(ValueError, match=r"(?s)An unknown sharding.*rowwise"):
        build_shardings(SPECS, TablesConfig(per_table={"item": "rowwise"}))


def test_table_wise_tables_spread_over_ranks_by_size() -> None:
    specs = [TableSpec(name, rows, (name,)) for name, rows in (("a", 100), ("b", 90), ("c", 80), ("d", 70))]
    config = TablesConfig(shard_rows=1, sharding="table_wise")
    ranks = {p.table: p.ranks for p in build_placements(specs, build_shardings(specs, config), 8, 2, config)}
    assert ranks == {"a": (0,), "b": (1,), "c": (1,), "d": (0,)}
