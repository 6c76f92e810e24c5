"""On one rank the lookup without an exchange gives and learns what the exchanged one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from distrag.embedding.config import TablesConfig, TableSpec
from distrag.embedding.direct import skip_exchange
from distrag.world import World, end_world, start_world
from tests.embedding.test_tables import shard

SPECS = [TableSpec("item", 50, ("item", "item:next")), TableSpec("shop", 9, ("shop",)), TableSpec("kind", 5, ("kind",))]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    made = start_world("cpu")
    yield made
    end_world(made)


def batch(order: list[str], seed: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    rows = {"item": 50, "item:next": 50, "shop": 9, "kind": 5}
    lengths = {key: torch.randint(0, 5, (6,), generator=random) for key in sorted(rows)}
    values = {key: torch.randint(0, rows[key], (int(lengths[key].sum()),), generator=random) for key in sorted(rows)}
    return KeyedJaggedTensor(order, torch.cat([values[key] for key in order]), lengths=torch.cat([lengths[key] for key in order]))


def learn(model: nn.Module) -> list[torch.Tensor]:
    seen = []
    for step in range(4):
        model.fused_optimizer.zero_grad()
        found = model(batch(model.module.tables.key_order, step))
        loss = sum((found[key].square().sum(1) * (k + 1)).sum() for k, key in enumerate(sorted(found)))
        loss.backward()
        model.fused_optimizer.step()
        seen += [found[key].detach() for key in sorted(found)]
    return seen


@pytest.mark.parametrize(
    "config",
    [
        TablesConfig(shard_rows=1),
        TablesConfig(shard_rows=1, sharding="table_wise", optimizer="adagrad"),
        TablesConfig(shard_rows=1, sharding="column_wise", optimizer="sgd"),
        TablesConfig(shard_rows=6, per_table={"item": "column_wise"}, optimizer="adagrad"),
    ],
    ids=lambda config: f"{config.sharding}-{config.optimizer}-{len(config.per_table)}",
)
def test_the_direct_lookup_equals_the_exchanged_one_step_after_step(config: TablesConfig) -> None:
    exchanged, direct = shard(config, specs=SPECS), shard(config, specs=SPECS)
    assert skip_exchange(direct) == 1
    for expected, got in zip(learn(exchanged), learn(direct), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_lengths_come_with_the_vectors() -> None:
    model = shard(TablesConfig(shard_rows=1), specs=SPECS)
    skip_exchange(model)
    ids = batch(model.module.tables.key_order, 7)
    for key, jagged in model.module.tables.sharded(ids).items():
        assert torch.equal(jagged.lengths(), ids[key].lengths())
        assert jagged.values().shape == (int(jagged.lengths().sum()), 8)


def test_an_id_outside_its_table_is_refused() -> None:
    model = shard(TablesConfig(shard_rows=1), specs=SPECS[2:])
    skip_exchange(model)
    with pytest.raises(ValueError, match="An id outside its table"):
        model(KeyedJaggedTensor(["kind"], torch.tensor([1, 5]), lengths=torch.tensor([1, 1])))
