"""The plan in numbers: what it prints, and the same numbers worked out by hand on a store of eight equal rows."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distrag.config import read_config
from distrag.encoder import ENCODERS
from distrag.encoder.attention import grouped_attention
from distrag.encoder.padding import count_cells, inner_padding
from distrag.ragged import lengths_to_offsets
from distrag.training.composition import Entropy, max_over_mean, recommend, spread, spread_runs
from distrag.training.plan import length_histogram, plan_run
from distrag.training.plan_text import describe_plan
from tests.batching.stores import lengths_store, small_store

NUMBERS = {
    "world_size": int,
    "epoch": int,
    "num_samples": int,
    "num_tokens": int,
    "num_steps": int,
    "num_steps_of_run": int,
    "num_cut": int,
    "cost": list,
    "cost_from": str,
    "steps_looked_at": int,
    "rank_tokens_min": int,
    "rank_tokens_mean": float,
    "rank_tokens_max": int,
    "rank_samples_min": int,
    "rank_samples_mean": float,
    "rank_samples_max": int,
    "dummy_share": float,
    "imbalance_mean": float,
    "imbalance_p99": float,
    "imbalance_max": float,
    "token_imbalance_mean": float,
    "token_imbalance_p99": float,
    "padded_batch_padding_share": float,
    "encoder_padding_share_cpu": float,
    "encoder_padding_share_cuda": float,
    "buckets": list,
    "bucket_steps_advice": dict,
    "memory_per_rank": dict,
    "sent_per_rank_and_step": dict,
    "torchrec": dict,
    "length_histogram": list,
    "features_read": list,
    "features_left_out": list,
    "tables": list,
}


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows of 7 events: leave-one-out leaves histories of 4, one rank in two holds two of them."""
    return lengths_store(tmp_path_factory.mktemp("equal"), [7] * 8).path


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).lognormal(2.5, 0.9, 3000).astype(int).clip(1, 200)
    return lengths_store(tmp_path_factory.mktemp("uneven"), [int(n) for n in lengths]).path


def config(store: Path, **sections: Any) -> Any:
    base: dict[str, Any] = {
        "data": {"path": str(store), "max_len": 8},
        "batching": {"max_tokens": 8, "prefetch": 1},
        "model": {"dim": 8},
        "encoder": {"name": "mean"},
        "loss": {"name": "bce"},
        "train": {"num_epochs": 1, "device": "cpu", "run_dir": str(store.parent / "run")},
    }
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return read_config({**base, **merged})


def test_the_numbers_are_json_of_known_names_and_types(uneven: Path) -> None:
    numbers = plan_run(config(uneven, data={"max_len": 100}, batching={"max_tokens": 512}, encoder={"name": "sasrec"}), 3)
    again = json.loads(json.dumps(numbers))
    assert {name: type(value) for name, value in again.items()} == NUMBERS
    assert [row["bucket_steps"] for row in numbers["buckets"]] == [1, 2, 4, 16, 64]
    memory = numbers["memory_per_rank"]
    assert memory["total_bytes"] == sum(memory[f"{kind}_bytes"] for kind in ("tables", "dense", "activation", "exchange", "batch"))
    assert sum(it["samples"] for it in numbers["length_histogram"]) == numbers["num_samples"] == 3000
    assert [it["table"] for it in numbers["torchrec"]["tables"]] == ["item_id"]
    assert numbers["rank_tokens_max"] <= 512
    text = describe_plan(numbers, width=100)
    assert max(map(len, text.splitlines())) <= 200
    for words in ("steps an epoch", "padding", "entropy", "memory", "sent by a rank", "TorchRec", "samples by length", "#"):
        assert words in text


def test_padding_falls_and_mixing_falls_as_more_steps_share_a_pool(uneven: Path) -> None:
    rows = plan_run(config(uneven, data={"max_len": 100}, batching={"max_tokens": 512, "bucket_steps": 8}), 2, planner_s=0)["buckets"]
    assert [row["bucket_steps"] for row in rows] == [1, 2, 4, 8, 16, 64]
    padded, mixed = [row["padded_batch_padding_share"] for row in rows], [row["entropy"] for row in rows]
    assert padded[0] > 0.5
    assert padded[-1] < 0.15
    assert mixed[0] > 0.9
    assert mixed[-1] < 0.4
    assert mixed == sorted(mixed, reverse=True)


def test_balance_by_hand(equal: Path) -> None:
    numbers = plan_run(config(equal), 2, planner_s=0)
    assert (numbers["num_samples"], numbers["num_tokens"], numbers["num_steps"]) == (8, 32, 2)
    for what, each in (("tokens", 8), ("samples", 2)):
        assert [numbers[f"rank_{what}_{how}"] for how in ("min", "mean", "max")] == [each, each, each]
    for name in ("imbalance_mean", "imbalance_p99", "imbalance_max", "token_imbalance_mean", "token_imbalance_p99"):
        assert numbers[name] == 1.0
    assert numbers["padded_batch_padding_share"] == numbers["dummy_share"] == 0.0
    assert numbers["length_histogram"] == [{"from": 4, "to": 4, "samples": 8}]
    assert all(row["entropy"] == 1.0 for row in numbers["buckets"])


def test_max_over_mean_by_hand() -> None:
    assert max_over_mean(np.array([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]])).tolist() == [1.5, 1.0, 1.0]
    assert max_over_mean(np.zeros((0, 2))).tolist() == [1.0]


# 51 rows of width 8; a rank and step looks up 8 history ids, 2 next ids, 8 negatives: 18 ids of 3 keys, for 2 samples
def sent(store: Path, kind: str, world_size: int = 2, optimizer: str = "sgd") -> dict[str, float]:
    found = plan_run(config(store, tables={"per_table": {"item_id": kind}, "optimizer": optimizer}), world_size, planner_s=0)
    numbers: dict[str, float] = found["sent_per_rank_and_step"]
    return numbers


@pytest.mark.parametrize(
    ("kind", "ids", "vectors", "gradients", "reduced", "most"),
    [
        # half of the ids and of the rows; the lengths of each key to the one other rank
        ("row_wise", 18 * 8 / 2 + 2 * 3 * 8, 18 * 32 / 2, 18 * 32 / 2, 0, 696),
        # means of a rank that holds the table (it sends 18 vectors) and of one that does not (all its ids, lengths and gradients)
        ("table_wise", (18 * 8 + 2 * 3 * 8) / 2, 18 * 32 / 2, 18 * 32 / 2, 0, 18 * 8 + 2 * 3 * 8 + 18 * 32),
        # all ids and lengths to the other, half of each vector
        ("column_wise", 18 * 8 + 2 * 3 * 8, 18 * 32 / 2, 18 * 32 / 2, 0, 768),
        # a ring all-reduce of two ranks sends a gradient once
        ("replicated", 0, 0, 0, 51 * 32, 51 * 32),
    ],
)
def test_bytes_sent_by_hand(equal: Path, kind: str, ids: float, vectors: float, gradients: float, reduced: float, most: float) -> None:
    numbers = sent(equal, kind)
    assert [numbers[f"{name}_bytes"] for name in ("ids", "vectors", "gradients", "reduced")] == [ids, vectors, gradients, reduced]
    assert numbers["total_bytes_mean"] == ids + vectors + gradients + reduced
    assert numbers["total_bytes_max"] == most


def test_one_rank_sends_nothing_and_the_dense_part_is_reduced(equal: Path) -> None:
    for kind in ("row_wise", "table_wise", "column_wise", "replicated"):
        assert sent(equal, kind, 1)["total_bytes_mean"] == 0
    numbers = plan_run(config(equal, encoder={"name": "gru"}, tables={"shard_rows": 1}), 4, planner_s=0)["sent_per_rank_and_step"]
    assert numbers["reduced_bytes"] == 2 * 3 / 4 * (2 * 24 * 8 + 2 * 24) * 4


@pytest.mark.parametrize(
    ("tables", "world_size", "wanted"),
    [
        ({"shard_rows": 1, "optimizer": "rowwise_adagrad"}, 1, 51 * (8 + 1) * 4),
        ({"shard_rows": 1, "optimizer": "rowwise_adagrad"}, 2, 51 * (8 + 1) * 4 // 2),
        ({"shard_rows": 1, "optimizer": "sgd"}, 1, 51 * 8 * 4),
        ({"shard_rows": 1, "optimizer": "adagrad", "sharding": "table_wise"}, 2, 51 * (8 + 8) * 4),
        ({"replicated_optimizer": "adam"}, 2, 51 * (8 + 8 + 16) * 4),  # weights, dense gradient, two moments
        ({"replicated_optimizer": "sgd"}, 2, 51 * (8 + 8) * 4),
    ],
)
def test_memory_of_tables_by_hand(equal: Path, tables: dict[str, Any], world_size: int, wanted: int) -> None:
    assert plan_run(config(equal, tables=tables), world_size, planner_s=0)["memory_per_rank"]["tables_bytes"] == wanted


def test_memory_of_dense_parameters_and_batches_by_hand(tmp_path: Path) -> None:
    store = lengths_store(tmp_path, [7] * 400).path
    memory = plan_run(config(store, encoder={"name": "gru"}), 2, planner_s=0)["memory_per_rank"]
    assert memory["dense_bytes"] == 16 * (2 * 24 * 8 + 2 * 24)
    # 18 ids, lengths of 3 keys, 3 offsets, label, weight and sample number of 2 samples; this batch and one ahead
    assert memory["batch_bytes"] == pytest.approx(2 * (18 * 8 + 3 * 2 * 8 + 3 * 8 + 2 * (4 + 4 + 8)))
    assert memory["exchange_bytes"] == 0


def test_expected_activations_are_those_of_a_large_step(uneven: Path) -> None:
    """The line through small batches meets the peak of a batch of another size and composition."""
    from distrag.training import footprint
    from distrag.training.plan import open_subject
    from distrag.training.trial import take_samples

    sections: dict[str, Any] = {
        "data": {"max_len": 100},
        "batching": {"max_tokens": 512},
        "model": {"dim": 32},
        "encoder": {"name": "sasrec"},
    }
    subject = open_subject(config(uneven, **sections), 1)
    lengths = subject.lengths
    per_token, per_sample, fixed = footprint.measure_step(subject.config, subject.checked, lengths, 512).activations
    samples = take_samples(lengths, np.random.default_rng(3).permutation(len(lengths)), 6000, 6000)
    probe = footprint._build_probe(subject.config, subject.checked)
    batch = probe.batch(lengths[samples])
    batch.check(probe.rows)
    expected = per_token * int(lengths[samples].sum()) + per_sample * len(samples) + fixed
    assert footprint.measure_peak(lambda: probe.run(batch)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("loss", ["bce", "sampled_softmax", "full_softmax"])
def test_the_probe_looks_up_as_many_ids_as_a_real_batch(equal: Path, loss: str) -> None:
    from distrag.training import footprint
    from distrag.training.build import build_job
    from distrag.training.plan import open_subject
    from distrag.world import open_world

    run = config(equal, loss={"name": loss, "num_negatives": 5})
    subject, samples = open_subject(run, 1), np.arange(3)
    made = footprint._build_probe(run, subject.checked).batch(subject.lengths[samples])
    with open_world("cpu") as world:
        job = build_job(run, world)
        real = job.collate(job.views["train"], samples)
    assert made.ids.keys() == real.ids.keys()
    assert made.ids.lengths().tolist() == real.ids.lengths().tolist()
    assert footprint.batch_bytes(made) == footprint.batch_bytes(real)


def test_entropy_by_hand() -> None:
    lengths = np.array([1] * 8 + [2] * 8)
    entropy = Entropy(lengths)
    assert entropy.of([np.arange(8), np.arange(8, 16)]) == 0.0
    assert entropy.of([np.array([0, 8]), np.array([1, 9, 2, 10])]) == pytest.approx(1.0)
    three_to_one = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))  # in units of that of one to one, which is 1 bit
    assert entropy.of([np.array([0, 1, 2, 8])]) == pytest.approx(three_to_one)
    assert entropy.of([np.array([0, 1, 2, 8]), np.arange(8)]) == pytest.approx(three_to_one / 2)
    assert Entropy(np.full(4, 3)).of([np.arange(4)]) == 1.0
    assert Entropy(np.zeros(0, np.int64)).of([]) == 1.0


def test_cells_by_hand() -> None:
    lengths = np.array([1, 2, 3, 10, 0])
    assert [count_cells(lengths, kind) for kind in ("none", "unknown", "rectangle")] == [16, 16, 50]
    assert count_cells(lengths, "groups") == 3 * 3 + 10  # lengths up to 1.3 * 1 + 4 share a rectangle; empty ones are left out
    assert count_cells(np.zeros(0, np.int64), "rectangle") == 0


def test_grouped_attention_computes_the_cells_that_are_counted() -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 30)
    cells = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal cells
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index_select.default and out.shape[1:] == (24,):  # queries, keys and values of a group
                cells += out.shape[0]
            return out

    qkv = torch.randn(int(lengths.sum()), 24)
    with Count():
        grouped_attention(qkv, lengths_to_offsets(torch.from_numpy(lengths)), 2, causal=True)
    assert cells == count_cells(lengths, "groups")


def test_every_encoder_says_where_it_pads() -> None:
    def pads(name: str, **options: Any) -> str:
        common = {"device": "cpu", "half": False, "mixed": True, "states": True}
        return inner_padding(name, ENCODERS[name].Config(), 64, **{**common, **options})

    assert {pads(name) for name in ENCODERS} == {"none"}
    cuda = {name: pads(name, device="cuda") for name in ENCODERS}
    assert cuda == {**dict.fromkeys(("mean", "max", "sum"), "rectangle"), "gru": "none", "sasrec": "groups", "self_attention": "groups"}
    half = {name: pads(name, device="cuda", half=True) for name in ("sasrec", "self_attention", "mean")}
    assert half == {"sasrec": "none", "self_attention": "none", "mean": "rectangle"}
    assert pads("mean", device="cuda", states=False) == "none"
    assert pads("sasrec", half=True) == "groups"
    assert pads("mean", half=True, mixed=False) == "none"
    assert inner_padding("mine", None, 8, device="cpu", half=False, mixed=False, states=True) == "unknown"


def test_the_advice_is_the_smallest_bucket_with_little_padding() -> None:
    rows = [
        {"bucket_steps": k, "pad": pad, "entropy": mix} for k, pad, mix in ((1, 0.6, 1.0), (2, 0.4, 0.6), (4, 0.3, 0.4), (16, 0.1, 0.1))
    ]
    assert recommend(rows, "pad", "rectangle") == (4, "30% padding inside, entropy 0.40, where 1 has 60% and 1.00")
    assert recommend(rows[:2], "pad", "rectangle")[0] == 2
    assert recommend(rows, "pad", "none")[0] == recommend(rows, "pad", "unknown")[0] == 1


def test_the_plan_of_an_encoder_that_pads_on_cuda_recommends_buckets_there(uneven: Path) -> None:
    advice = plan_run(config(uneven, data={"max_len": 100}, batching={"max_tokens": 512}), 2, planner_s=0)["bucket_steps_advice"]
    assert advice["cpu"]["bucket_steps"] == 1
    assert advice["cuda"]["bucket_steps"] > 1


def test_histogram_classes_cover_every_length_once() -> None:
    lengths = np.random.default_rng(0).integers(0, 5000, 4000)
    classes = length_histogram(lengths)
    assert len(classes) <= 14
    assert classes[0]["from"] == lengths.min()
    assert classes[-1]["to"] == lengths.max()
    assert all(one["to"] + 1 == two["from"] for one, two in pairwise(classes))
    assert [((lengths >= it["from"]) & (lengths <= it["to"])).sum() for it in classes] == [it["samples"] for it in classes]
    assert length_histogram(np.array([0, 0, 2])) == [{"from": n, "to": n, "samples": k} for n, k in ((0, 2), (1, 0), (2, 1))]
    assert length_histogram(np.zeros(0, np.int64)) == []


def test_steps_are_spread_over_the_epoch() -> None:
    assert spread_runs(5, 256).tolist() == [0, 1, 2, 3, 4]
    assert spread_runs(100, 6, run=3).tolist() == [0, 1, 2, 97, 98, 99]
    assert spread_runs(0, 8).tolist() == []
    assert spread(5, 256).tolist() == [0, 1, 2, 3, 4]
    assert spread(0, 256).tolist() == []
    assert spread(1001, 3).tolist() == [0, 500, 1000]


def test_4096_ranks_are_planned_in_seconds(uneven: Path) -> None:
    started = time.perf_counter()
    asked = config(uneven, data={"max_len": 100}, batching={"global_tokens": 2**19, "max_tokens": None}, tables={"shard_rows": 1})
    numbers = plan_run(asked, 4096)
    assert time.perf_counter() - started < 60
    assert numbers["num_steps"] == 1
    assert 0 < numbers["rank_samples_mean"] < 1
    assert numbers["dummy_share"] > 0
    assert len(numbers["torchrec"]["tables"][0]["ranks"]) == 4096
    assert "4,096 rank(s)" in describe_plan(numbers)


def test_nodes_are_planned_with_their_own_rows(uneven: Path) -> None:
    run = config(uneven, data={"max_len": 100}, batching={"max_tokens": 512, "locality": "node"})
    numbers = plan_run(run, 4, ranks_per_node=2, planner_s=0)
    everywhere = plan_run(config(uneven, data={"max_len": 100}, batching={"max_tokens": 512}), 4, planner_s=0)
    assert numbers["num_tokens"] == everywhere["num_tokens"]
    assert numbers["rank_tokens_max"] <= 512
    assert numbers["num_steps"] >= everywhere["num_steps"]
    with pytest.raises(ValueError, match=r"(?s)Nodes are not alike.*4 ranks, 3 a node.*--ranks-per-node"):
        plan_run(run, 4, ranks_per_node=3)
    with pytest.raises(ValueError, match=r"(?s)out of range.*--ranks-per-node"):
        plan_run(run, 4, ranks_per_node=5)


def test_an_epoch_of_drawn_windows_is_planned_as_it_is_drawn(uneven: Path) -> None:
    run = config(uneven, data={"max_len": 100, "truncate": "stochastic", "mean_cost_share": 0.5}, batching={"max_tokens": 512})
    tokens = [plan_run(run, 2, epoch, planner_s=0)["num_tokens"] for epoch in (0, 0, 1)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_every_feature_labels_and_empty_histories(tmp_path: Path) -> None:
    store = small_store(tmp_path).path
    split = {"kind": "row", "valid_share": 0.0, "test_share": 0.0}
    for task, name in (("conversion", "self_attention"), ("next_item", "sasrec")):
        sections = {"task": task, "loss": {"name": ""}, "encoder": {"name": name}, "data": {"max_len": 8, "split": split}}
        numbers = plan_run(config(store, **sections), 2)
        assert numbers["num_samples"] == 4
        assert {it["table"] for it in numbers["torchrec"]["tables"]} == {line.split(": ")[0] for line in numbers["tables"]}


def test_a_view_of_empty_histories_is_planned(tmp_path: Path) -> None:
    numbers = plan_run(config(lengths_store(tmp_path, [1, 1, 0, 1]).path), 2)
    assert (numbers["num_tokens"], numbers["rank_tokens_max"]) == (0, 0)
    assert "0 tokens" in describe_plan(numbers)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batching": {"cost": [1.0, -1.0, 0.0]}}, "(?s)out of range.*-1.0.*batching.cost"),
        ({"batching": {"cost": [1.0, 2.0]}}, "(?s)another type.*cost"),
        ({"batching": {"cost": [1.0, float("nan"), 0.0]}}, "(?s)out of range.*nan.*batching.cost"),
        ({"batching": {"max_tokens": 7}}, "(?s)token budget is smaller than one sequence.*7"),
    ],
)
def test_costs_and_budgets_that_cannot_be(equal: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_run(config(equal, **sections), 2)


def test_other_mistakes(equal: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)out of range.*--planner-seconds"):
        plan_run(config(equal), 2, planner_s=float("nan"))
    with pytest.raises(ValueError, match=r"(?s)out of range.*--epoch"):
        plan_run(config(equal), 2, -1)
    split = {"kind": "row", "valid_share": 0.5, "test_share": 0.5}
    with pytest.raises(ValueError, match="No sample to train on"):
        plan_run(config(small_store(tmp_path).path, task="conversion", loss={"name": ""}, data={"split": split}), 2)


def test_a_cost_in_the_config_is_planned_by(equal: Path) -> None:
    numbers = plan_run(config(equal, batching={"cost": [0.0, 1.0, 2.0]}), 2, planner_s=0)
    assert (numbers["cost"], numbers["cost_from"]) == ([0.0, 1.0, 2.0], "batching.cost")
