"""A run whose saves are slow on one rank is the same run, its ranks in step, with saves written beside it or in its way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distrag.checkpoint import read_extra
from distrag.training.loop import train
from tests.checkpoint.jobs import slow_down
from tests.ranks import run_ranks
from tests.training.runs import config, losses_of, read_lines, write_histories


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("saving") / "store")


@pytest.mark.parametrize("beside", [True, False])
def test_saves_that_are_slow_on_the_first_rank_change_nothing(store: Path, tmp_path: Path, beside: bool) -> None:
    """Saves every two steps, evaluations every three that keep the best: what is decided is decided from one number, by all ranks."""
    keys = {"train__save_every": 2, "train__eval_every": 3, "train__num_epochs": 1, "train__patience": 3, "train__async_save": beside}
    if beside:
        keys["train__keep"] = 1

    def go(run: Path, slow: bool) -> tuple[int, float]:
        if slow and os.environ["RANK"] == "0":
            slow_down(".distcp", 0.2)
        result = train(config(store, run, **keys))
        return result.best_step, result.valid["ndcg@10"]  # type: ignore[return-value]

    wanted = run_ranks(go, 2, tmp_path / "quick", False)
    assert run_ranks(go, 2, tmp_path / "slow", True, timeout_s=120) == wanted
    assert wanted[0] == wanted[1]
    assert losses_of(tmp_path / "slow") == losses_of(tmp_path / "quick")
    kept = read_extra(tmp_path / "slow" / "checkpoints" / "best")
    assert (kept["step"], kept["best_step"]) == (wanted[0][0], wanted[0][0])
    valid = [line for line in read_lines(tmp_path / "slow" / "metrics.jsonl") if line["kind"] == "valid"]
    assert max(line["ndcg@10"] for line in valid) == kept["best"]
    result = json.loads((tmp_path / "slow" / "result.json").read_text())
    assert len(list((tmp_path / "slow" / "checkpoints").glob("step-*"))) == (1 if beside else 2)
    assert result["num_steps"] == len(losses_of(tmp_path / "quick"))
