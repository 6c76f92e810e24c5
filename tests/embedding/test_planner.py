"""TorchRec's planner, asked without a process group: its ratings are its own, its silence and its refusals are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints

from distrag.embedding import planner
from distrag.embedding.config import TablesConfig, TableSpec

SPECS = [
    TableSpec("item", 1_000_001, ("item", "item:next", "item:negative")),
    TableSpec("city", 300, ("city",)),
    TableSpec("flag", 3, ("flag",)),
]
FACTORS = {"item": 80.0, "item:next": 1.0, "item:negative": 16.0, "city": 1.0, "flag": 80.0}


def ask(world_size: int, config: TablesConfig | None = None, **options: Any) -> planner.Advice:
    return planner.ask_planner(
        SPECS, config or TablesConfig(), 64, world_size, **{"device": "cpu", "batch_size": 32, "pooling_factors": FACTORS, **options}
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_rating_one_shard_of_each_size_rates_them_all(device: str, world_size: int) -> None:
    topology = planner._topology(TablesConfig(), world_size, device)
    constraints = {spec.name: ParameterConstraints(pooling_factors=[FACTORS[key] for key in spec.keys]) for spec in SPECS}
    tables = [EmbeddingConfig(name=s.name, num_embeddings=s.num_rows, embedding_dim=64, feature_names=list(s.keys)) for s in SPECS]
    collection = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    theirs, ours = (
        [
            (option.name, option.sharding_type, option.compute_kernel, [(s.size, s.offset, s.perf, s.storage) for s in option.shards])
            for option in kind(topology=topology, batch_size=32, constraints=constraints).enumerate(
                collection, [EmbeddingCollectionSharder()]
            )
        ]
        for kind in (EmbeddingEnumerator, planner._Enumerator)
    )
    assert ours == theirs
    assert {option[1] for option in ours} >= {"row_wise", "table_wise", "column_wise", "data_parallel"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_places_every_table_without_a_word(device: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    advice = ask(64, device=device)
    assert [proposal.table for proposal in advice.proposals] == ["item", "city", "flag"]
    assert advice.proposals[0].sharding == "row_wise"
    assert advice.proposals[0].ranks == tuple(range(64))
    assert str(advice.proposals[0]) == "item: row_wise on 64 ranks"
    assert advice.note == ""
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == 0


def test_pooling_factors_count() -> None:
    """A small table is replicated where every sample reads it many times; TorchRec would take one id a sample for every table."""
    kinds = [
        {p.table: p.sharding for p in ask(64, pooling_factors={**FACTORS, "city": factor}).proposals}["city"] for factor in (1e-3, 1e4)
    ]
    assert kinds == ["row_wise", "data_parallel"]


def test_column_wise_is_offered_only_where_it_is_exact() -> None:
    kinds = {p.sharding for p in ask(4, TablesConfig(optimizer="rowwise_adagrad")).proposals}
    assert "column_wise" not in kinds


def test_refusals_are_told() -> None:
    advice = ask(2, TablesConfig(max_gib_per_rank=0.001))
    assert advice.proposals == ()
    assert "it refuses: Unable to find a plan" in advice.note
    assert logging.root.manager.disable == 0


def test_what_would_take_long_is_not_tried_and_is_stopped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(2, limit_s=0).note == "not asked"
    assert "about 2 s for 3 tables on 1,024 ranks: give it --planner-seconds 3" in ask(1024, limit_s=0.5).note
    monkeypatch.setattr(planner, "_SECONDS", 0.0)
    advice = ask(1024, limit_s=1e-6)
    assert "stopped after" in advice.note
    assert advice.seconds < 10
