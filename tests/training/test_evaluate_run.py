"""A run evaluated again: from any folder, on stores that mean the same, by the checkpoint that each part belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distrag.data.store import open_store
from distrag.data.write import write_store
from distrag.training.evaluate_run import evaluate_run, find_part
from distrag.training.loop import train


def ring(path: Path, *, seed: int = 1, words: list[str] | None = None, num_items: int = 20, **more: Any) -> Path:
    """Users who walk through a ring of items; another seed gives other users of the same items."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 12, 60)
    rows = [(start + np.arange(n)) % num_items + 1 for start, n in zip(random.integers(0, num_items, 60), lengths, strict=True)]
    vocabulary = pa.array(sorted(words or [f"film-{i:02}" for i in range(num_items)]))
    history = {"item": np.concatenate(rows), "price": random.random(lengths.sum()).astype(np.float32)}
    write_store(
        path,
        history=history,
        offsets=np.concatenate([[0], lengths.cumsum()]),
        vocabularies={"item": vocabulary},
        features={"price": more},
        tables={"item": num_items + 1},
        label=np.arange(60) % 2,
    )
    return path


def sections(store: Path, run_dir: Path, **train_keys: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(store), "max_len": 12},
        "batching": {"global_tokens": 128},
        "model": {"dim": 8},
        "encoder": {"name": "gru"},
        "loss": {"name": "full_softmax"},
        "optim": {"lr": 0.02},
        "train": {"num_epochs": 4, "run_dir": str(run_dir), "device": "cpu", "tensorboard": False, "refit": True, **train_keys},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    ring(folder / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(sections(Path("store"), Path("run")))
    return folder


def test_each_part_is_scored_by_the_state_that_training_scored_it_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the store was named relative to another folder
    result = json.loads((folder / "run" / "result.json").read_text())
    for part in ("valid", "test"):
        again, _ = evaluate_run(str(folder / "run"), part)
        assert again == pytest.approx(result[part], abs=1e-6)


def test_valid_is_never_scored_by_a_refit_and_test_only_where_there_was_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    assert find_part(tmp_path, "test") == checkpoints / "best"
    (checkpoints / "refit.old").mkdir(parents=True)  # a save that was cut between its two renames
    (checkpoints / "refit.old" / "manifest.json").touch()
    assert find_part(tmp_path, "test") == checkpoints / "refit"
    assert find_part(tmp_path, "valid") == checkpoints / "best"


def test_other_cut_offs_rank_the_same_users(folder: Path) -> None:
    metrics, _ = evaluate_run(str(folder / "run"), ks=[1, 20])
    assert {"hr@1", "hr@20"} <= metrics.keys()
    assert not {"hr@5", "ndcg@10"} & metrics.keys()
    assert metrics["hr@20"] == 1.0
    with pytest.raises(ValueError, match=r"(?s)out of range.*0.*where:  --ks"):
        evaluate_run(str(folder / "run"), ks=[0])


def test_newer_histories_with_the_same_vocabulary_are_welcome(folder: Path, tmp_path: Path) -> None:
    metrics, _ = evaluate_run(str(folder / "run"), data=str(ring(tmp_path / "newer", seed=7)))
    assert metrics["users"] == 60


def test_a_further_feature_of_a_newer_store_stays_unread(folder: Path, tmp_path: Path) -> None:
    first = ring(tmp_path / "first")
    store = open_store(first)
    history = {"item": store.position("item"), "price": store.position("price"), "shop": store.position("item") % 3}
    tables, vocabularies = {"item": 21, "shop": 3}, {"item": store.vocabulary("item")}
    write_store(tmp_path / "wider", history=history, offsets=store.offsets, tables=tables, vocabularies=vocabularies, label=store.label)
    expected, _ = evaluate_run(str(folder / "run"))
    found, _ = evaluate_run(str(folder / "run"), data=str(tmp_path / "wider"))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("truncate", ["oldest", "random_window", "stochastic"])
def test_a_run_is_evaluated_with_the_windows_it_was_tested_with(folder: Path, tmp_path: Path, truncate: str) -> None:
    run = sections(folder / "store", tmp_path / "run", num_epochs=1, refit=truncate == "stochastic")
    run["data"] |= {"max_len": 4, "truncate": truncate, "mean_cost_share": 0.6}
    result = train(run)
    assert evaluate_run(str(result.run_dir), "test")[0] == pytest.approx(result.test, abs=1e-6)
    store = open_store(folder / "store")
    few = np.concatenate([np.arange(start, start + 4) for start in store.offsets[:-1]])  # too short for any law of stochastic
    history = {"item": store.position("item")[few], "price": store.position("price")[few]}
    names = {"item": store.vocabulary("item")}
    write_store(tmp_path / "short", history=history, offsets=4 * np.arange(61), tables={"item": 21}, vocabularies=names, label=store.label)
    assert evaluate_run(str(result.run_dir), data=str(tmp_path / "short"))[0]["users"] == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_items": 19}, r"(?s)tables are not those.*20 rows.*21 rows.*'item'"),
        ({"words": [f"film-{i:02}" for i in range(19)] + ["film-99"]}, r"(?s)tables are not those.*vocabulary with hash.*'item'"),
        ({"mean": 3.0, "std": 2.0}, r"(?s)features are not those.*mean 3.0, std 2.0.*mean 0.0, std 1.0.*'price'"),
    ],
)
def test_a_store_that_means_something_else_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    other = ring(tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=message):
        evaluate_run(str(folder / "run"), data=str(other))


def test_cut_offs_are_refused_where_nothing_is_ranked(folder: Path, tmp_path: Path) -> None:
    run = sections(folder / "store", tmp_path / "run", num_epochs=1, refit=False)
    run["data"]["split"] = {"kind": "row"}
    train({**run, "task": "conversion", "loss": {}})
    with pytest.raises(ValueError, match=r"(?s)Cut-offs where nothing is ranked.*--ks with conversion"):
        evaluate_run(str(tmp_path / "run"), ks=[5])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)No run in this folder.*config.yaml"):
        evaluate_run(str(tmp_path))
    (tmp_path / "config.yaml").write_text("train: {max_steps: 1}\n")
    with pytest.raises(ValueError, match=r"(?s)Not a whole run.*schema.yaml"):
        evaluate_run(str(tmp_path))
