"""`distrag bench saving` on two ranks: every number has its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distrag.cli import main
from tests.ranks import run_ranks


def test_saves_of_both_kinds_are_measured_in_turn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "3000", "--dim", "16", "--batch-size", "16", "--rounds", "2", "--steps", "4"]
    words += ["--folder", str(tmp_path / "disk"), "--json", str(tmp_path / "saving.json")]
    run_ranks(main, 2, ["bench", "saving", *words])
    report = json.loads((tmp_path / "saving.json").read_text())
    assert report["world_size"] == 2
    assert report["bytes"] > 3000 * 16 * 4
    assert [len(laps) for laps in report["laps"].values()] == [2, 2, 2]
    assert report["medians"]["none"]["held_s"] < report["medians"]["in the way"]["held_s"]
    assert report["medians"]["none"]["lost_s"] == pytest.approx(0, abs=0.05)
    printed = capfd.readouterr().out
    assert printed.count("holds up") == 2
    assert "beside: holds up" in printed
