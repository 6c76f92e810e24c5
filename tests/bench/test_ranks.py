"""`distrag bench ranks` on two real ranks: both sides train on the same samples, and every number has its place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distrag.bench.histories import draw_histories
from distrag.bench.ragged import write_histories
from distrag.bench.ranks import SIDES, RankLap
from distrag.cli import main
from tests.ranks import run_ranks


def test_a_lap_in_numbers() -> None:
    own, wait, cpu = np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[0.0, 0.0], [0.0, 1.0]]), np.full((2, 2), 0.5)
    numbers = RankLap(own, wait, cpu, wall_s=10.0, tokens=500, samples=8).numbers()
    assert numbers["own_imbalance"] == pytest.approx((3 + 2) / (2 + 2))
    assert numbers["cpu_imbalance"] == 1
    assert numbers["worst_rank_share"] == pytest.approx((2 / 2 + 1 / 2) / 10)
    assert numbers["exchange_share"] == pytest.approx(1 - 4.5 / 10)
    assert (numbers["step_ms"], numbers["tokens_per_s"], numbers["num_samples"]) == (5000, 50, 8)


def test_two_ranks_train_as_many_samples_by_either_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_histories(draw_histories(120, 40, max_len=60), tmp_path / "store")
    words = ["--store", str(tmp_path / "store"), "--dim", "16", "--num-layers", "1", "--max-len", "60", "--samples-a-rank", "8"]
    words += ["--rounds", "2", "--device", "cpu", "--json", str(tmp_path / "ranks.json")]
    run_ranks(main, 2, ["bench", "ranks", *words])
    report = json.loads((tmp_path / "ranks.json").read_text())
    assert set(report["sides"]) == set(report["laps"]) == set(SIDES)
    assert report["world_size"] == 2
    for name, side in report["sides"].items():
        assert [lap["num_samples"] for lap in report["laps"][name]] == [120, 120]
        assert len({lap["num_tokens"] for laps in report["laps"].values() for lap in laps}) == 1
        assert all(side[key] >= 1 for key in ("planned_imbalance", "own_imbalance", "cpu_imbalance"))
        assert 0 <= side["worst_rank_share"] < 1
        assert 0 <= side["exchange_share"] < 1
        assert side["tokens_per_s"] > 0
    assert report["sides"]["distrag"]["planned_imbalance"] < report["sides"]["plain"]["planned_imbalance"]
    assert abs(report["sides"]["distrag"]["num_steps"] - report["sides"]["plain"]["num_steps"]) <= 1
    printed = capfd.readouterr().out
    assert printed.count("DistributedSampler") == 1  # rank 0 alone prints
    assert all(word in printed for word in ("planned", "waited %", "step ms", "tokens/s", "2 ranks on cpu"))


def test_one_rank_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_histories(draw_histories(20, 10, max_len=9), tmp_path / "store")
    with pytest.raises(SystemExit):
        main(["bench", "ranks", "--store", str(tmp_path / "store"), "--device", "cpu"])
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
