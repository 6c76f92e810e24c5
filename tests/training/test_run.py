"""A run as a user sees it: what it writes, when it stops, what it refuses, and what comes back from its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from distrag.config import read_config
from distrag.data.write import write_store
from distrag.report.page import write_report
from distrag.training.build import build_job
from distrag.training.evaluate_run import evaluate_run
from distrag.training.loop import run_job, train
from distrag.training.optim import Schedule
from distrag.world import open_world, start_world
from tests.ranks import RankError, run_ranks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who walk through a ring of items: the next item is certain, so a model can learn it."""
    random = np.random.default_rng(1)
    lengths = random.integers(3, 15, 120)
    rows = [(start + np.arange(n)) % 40 + 1 for start, n in zip(random.integers(0, 40, 120), lengths, strict=True)]
    path = tmp_path_factory.mktemp("run") / "store"
    label = np.array([row[-1] > 20 for row in rows])
    write_store(
        path, history={"item": np.concatenate(rows)}, offsets=np.concatenate([[0], lengths.cumsum()]), label=label, key=np.arange(120) % 9
    )
    return path


def config(store: Path, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "data": {"path": str(store), "max_len": 15},
        "batching": {"global_tokens": 256},
        "model": {"dim": 16},
        "encoder": {"name": "sasrec", "num_layers": 1, "dropout": 0.0},
        "loss": {"name": "full_softmax"},
        "optim": {"lr": 0.01},
        "train": {"num_epochs": 12, "log_every": 2, "run_dir": str(run_dir), "device": "cpu"},
    }
    return {**base, **{key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}}


def test_a_run_learns_a_certain_pattern_and_leaves_everything_it_did(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run"))
    assert result.test["hr@5"] is not None
    assert result.test["hr@5"] > 0.9
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = {"step", "epoch", "loss", "global_tokens", "samples", "tokens_per_s", "imbalance", "padded_batch_padding_share"}
    wanted |= {"data_wait_share", "grad_norm", "lr"}
    trained = [line for line in lines if line["kind"] == "train"]
    assert all(wanted <= line.keys() for line in trained)
    assert trained[-1]["loss"] < trained[0]["loss"] / 2
    assert [line["kind"] for line in lines if line["kind"] != "train"] == ["valid"] * 12 + ["test"]
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    assert summary["test"]["users"] == 120
    assert summary["world_size"] == 1
    assert {"torch", "torchrec", "python"} <= summary["versions"].keys()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optim"]["lr"] == 0.01
    assert (tmp_path / "run" / "schema.yaml").exists()
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    page = write_report(tmp_path / "run").read_text()
    assert "ndcg@10" in page
    assert "polyline" in page


@pytest.mark.parametrize("shard_rows", [1, 1000])
def test_a_run_on_two_ranks_gives_the_same_test_metrics_from_its_checkpoint_on_one(store: Path, tmp_path: Path, shard_rows: int) -> None:
    sections = config(store, tmp_path / "run", tables={"shard_rows": shard_rows}, loss={"name": "sampled_softmax"}, train={"num_epochs": 3})
    tests = run_ranks(lambda: train(sections).test, 2, timeout_s=200)
    assert tests[0] == tests[1]
    again, rank = evaluate_run(str(tmp_path / "run"))
    assert rank == 0
    for name, value in tests[0].items():
        assert again[name] == pytest.approx(value, abs=1e-6), name


def test_an_earlier_run_in_the_folder_is_moved_aside_not_lost(store: Path, tmp_path: Path) -> None:
    for _ in range(3):
        train(config(store, tmp_path / "run", train={"num_epochs": 0, "max_steps": 2}))
    assert all((tmp_path / name / "result.json").exists() for name in ("run", "run.1", "run.2"))


def test_training_stops_after_patience_and_tests_the_best_state(store: Path, tmp_path: Path) -> None:
    """A rate that grows without end makes later states worse than the best, so only a reload of the best can test as it did on valid."""
    sections = config(store, tmp_path / "run", optim={"lr": 0.3, "warmup_steps": 400}, train={"num_epochs": 50, "patience": 3})
    result = train(sections)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [line["ndcg@10"] for line in lines if line["kind"] == "valid"]
    assert len(scores) < 50
    assert scores.index(max(scores)) == len(scores) - 4
    again, _ = evaluate_run(str(tmp_path / "run"), "valid")
    assert again["ndcg@10"] == pytest.approx(max(scores))
    assert result.valid["ndcg@10"] == max(scores)
    tested, _ = evaluate_run(str(tmp_path / "run"), "test")
    assert tested["ndcg@10"] == pytest.approx(result.test["ndcg@10"])


def test_a_refit_trains_on_valid_too_and_is_what_evaluate_reads(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run", train={"num_epochs": 3, "refit": True}))
    assert result.refit_steps >= result.best_step
    again, _ = evaluate_run(str(tmp_path / "run"))
    assert again["ndcg@10"] == pytest.approx(result.test["ndcg@10"])
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "refit" in kinds


def test_conversion_learns_labels_and_reports_group_auc(store: Path, tmp_path: Path) -> None:
    sections = config(store, tmp_path / "run", encoder={"name": "gru"}, loss={"name": "bce"}, train={"num_epochs": 40})
    sections["data"]["split"] = {"kind": "row", "valid_share": 0.2, "test_share": 0.2}
    result = train({**sections, "task": "conversion"})
    assert result.test["auc"] is not None
    assert result.test["auc"] > 0.8
    assert {"log_loss", "ne", "gauc", "gauc_mean", "calibration"} <= result.test.keys()


def test_bf16_trains_the_dense_part_and_keeps_tables_in_float32(store: Path, tmp_path: Path) -> None:
    seen = set()
    with open_world("cpu") as world:
        job = build_job(read_config(config(store, tmp_path / "run", train={"precision": "bf16"})), world)
        job.parallel.plain.encoder.transformer.blocks[0].up.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
        result = run_job(job)
        assert {p.dtype for p in job.parallel.model.parameters()} == {torch.float32}
    assert seen == {torch.bfloat16}
    assert result.test["hr@5"] is not None
    assert result.test["hr@5"] > 0.8


def test_a_parameter_that_is_no_number_stops_the_run_at_once_with_a_remedy(store: Path, tmp_path: Path) -> None:
    with open_world("cpu") as world:
        job = build_job(read_config(config(store, tmp_path / "run")), world)
        job.parallel.plain.encoder.transformer.blocks[0].up.bias.data[0] = float("nan")
        with pytest.raises(ValueError, match=r"(?s)without finite numbers.*parameter encoder.*nan.*step 1.*lower --optim.lr"):
            run_job(job)


def test_epochs_are_whole_even_where_they_differ_in_steps(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run", batching={"global_tokens": 31}, data={"path": str(store), "max_len": 15}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.num_epochs == 12
    assert [line["epoch"] for line in lines if line["kind"] == "valid"] == list(range(1, 13))


def test_what_rank_0_cannot_write_ends_every_rank_with_one_reason(store: Path, tmp_path: Path) -> None:
    def attempt() -> str:
        with pytest.raises(ValueError, match="cannot be written") as caught:
            train(config(store, tmp_path / "run"))
        return str(caught.value)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    first, second = run_ranks(attempt, 2)
    assert first in second


def test_a_rank_that_fails_alone_ends_the_others_soon_and_shows_its_own_error(store: Path, tmp_path: Path) -> None:
    def attempt() -> None:
        job = build_job(read_config(config(store, tmp_path / "run")), start_world("cpu"))
        if job.world.rank == 1:
            take = job.collate

            def broken(*given: Any, **named: Any) -> Any:
                if named["step"] == 1:
                    raise ValueError("bad row 17")
                return take(*given, **named)

            job = dataclasses.replace(job, collate=_Broken(take, broken))
        run_job(job)

    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised.*bad row 17"):
        run_ranks(attempt, 2)
    assert time.monotonic() - started < 60


class _Broken:
    """A collate that fails at one step, as one that meets a damaged row does."""

    def __init__(self, whole: Any, call: Any) -> None:
        self.whole, self.call = whole, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.call(*given, **named)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"path": "nowhere"}}, "nowhere"),
        ({"data": {"history": ["itm"]}}, "(?s)no such feature.*itm"),
        ({"data": {"target": "itm"}}, "(?s)predicts an id feature.*itm"),
        ({"encoder": {"name": "self_attention"}}, "(?s)sees the future.*self_attention with next_item.*sasrec"),
        ({"tables": {"shard_rows": 1}}, "(?s)full_softmax needs the whole item table.*row_wise"),
        ({"tables": {"per_table": {"itme": "row_wise"}}}, "(?s)A table that does not exist.*itme"),
        ({"tables": {"shard_rows": 1, "optimizer": "adam"}, "loss": {"name": "bce"}}, "(?s)No such fused optimizer.*adam on cpu"),
        ({"tables": {"max_gib_per_rank": 1e-6}}, "(?s)tables do not fit.*item: 41 x 16"),
        ({"loss": {"name": "binary"}}, "(?s)loss does not fit the task.*binary with next_item"),
        ({"encoder": {"num_heads": 3}}, "(?s)heads"),
        ({"train": {"num_epochs": 0}}, "The run has no length"),
        ({"train": {"metric": "ndcg@7"}}, "(?s)No such metric.*ndcg@7.*ndcg@10"),
        ({"task": "conversion", "loss": {"name": ""}}, "(?s)split does not fit the task"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank_alike(store: Path, tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(config(store, tmp_path / "run", **sections))


def test_a_refusal_on_two_ranks_ends_both_with_the_same_reason(store: Path, tmp_path: Path) -> None:
    def attempt() -> str:
        with pytest.raises(ValueError, match="tables do not fit") as caught:
            train(config(store, tmp_path / "run", tables={"max_gib_per_rank": 1e-6}))
        return str(caught.value)

    first, second = run_ranks(attempt, 2, timeout_s=120)
    assert first == second


def test_warm_up_and_cosine_reach_dense_and_fused_rates_without_a_lag(store: Path, tmp_path: Path) -> None:
    from distrag.config import OptimConfig

    class Holder:
        param_groups = ({"lr": 1.0}, {"lr": 0.5})

    schedule = Schedule(Holder(), OptimConfig(warmup_steps=4, schedule="cosine", min_lr_share=0.1), 14)  # type: ignore[arg-type]
    factors = [schedule.set(step) for step in range(15)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[9] == pytest.approx(0.55)
    assert factors[14] == pytest.approx(0.1)
    assert [group["lr"] for group in Holder.param_groups] == pytest.approx([0.1, 0.05])


def test_a_folder_in_which_a_run_is_at_work_is_left_alone(store: Path, tmp_path: Path) -> None:
    with open_world("cpu") as world:
        job = build_job(read_config(config(store, tmp_path / "run", train={"num_epochs": 2})), world)
        take, tried = job.collate, []

        def again(*given: Any, **named: Any) -> Any:
            if not tried:
                with pytest.raises(ValueError, match="Another run is at work in this folder"):
                    run_job(dataclasses.replace(job))
                tried.append(True)
            return take(*given, **named)

        result = run_job(dataclasses.replace(job, collate=_Broken(take, again)))
    assert tried
    assert result.num_epochs == 2
    assert not (tmp_path / "run.1").exists()


def test_what_holds_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "ones", history={"item": np.arange(1, 9)}, offsets=np.arange(9), label=np.arange(8) % 2, weight=np.zeros(8))
    sections = config(tmp_path / "ones", tmp_path / "run")
    with pytest.raises(ValueError, match=r"(?s)nothing to learn.*0 targets in 8 train samples"):
        train(sections)
    with pytest.raises(ValueError, match=r"(?s)nothing to learn.*weight above 0"):
        train({**sections, "task": "conversion", "loss": {}, "data": {**sections["data"], "split": {"kind": "row"}}})


def test_labels_other_than_0_and_1_are_refused_before_the_first_step(tmp_path: Path) -> None:
    write_store(tmp_path / "stars", history={"item": np.arange(1, 9)}, offsets=np.arange(9), label=np.arange(8) % 4)
    sections = config(tmp_path / "stars", tmp_path / "run")
    with pytest.raises(ValueError, match=r"(?s)neither 0 nor 1.*2\.0.*row 2"):
        train({**sections, "task": "conversion", "loss": {}, "data": {**sections["data"], "split": {"kind": "row"}}})
