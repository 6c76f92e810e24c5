"""`distrag bench` measures every cell it is asked for; no test looks at how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distrag.bench.histories import draw_histories
from distrag.bench.ragged import write_histories
from distrag.bench.timing import Lap, compare, run_rounds, step_s, tokens_per_s
from distrag.cli import main

TINY = ["--batch-sizes", "4", "8", "--rounds", "2", "--seconds", "0.001", "--dim", "8", "--max-len", "20", "--samples", "64"]


def test_the_command_writes_and_prints_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", *TINY, "--num-items", "50", "--json", str(tmp_path / "bench.json")])
    report = json.loads((tmp_path / "bench.json").read_text())
    cells = {(cell["encoder"], cell["batch_size"]) for cell in report["steps"]}
    assert cells == {(encoder, size) for encoder in ("gru", "self_attention", "mean") for size in (4, 8)}
    assert [cell["batch_size"] for cell in report["data_path"]] == [4, 8]
    for cell in report["steps"]:
        assert set(cell["step_ms"]) == set(cell["tokens_per_s"]) == {"distrag", "padded_adam", "padded_rowwise"}
        assert min(cell["ratio_adam"]["value"], cell["ratio_rowwise"]["value"]) > 0
        assert all(len(laps) == 2 for laps in cell["laps"].values())
    assert report["histories"]["num_samples"] == 64
    assert {"cpu", "torch_threads", "torch"} <= set(report["machine"])
    printed = capsys.readouterr().out
    assert "self_attention" in printed
    assert report["machine"]["cpu"] in printed


def test_a_store_of_your_own_and_a_choice_of_encoders(tmp_path: Path) -> None:
    write_histories(draw_histories(100, 30, max_len=50), tmp_path / "store")
    main(["bench", *TINY, "--data", str(tmp_path / "store"), "--encoders", "mean", "--fused-adam", "--json", str(tmp_path / "bench.json")])
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [cell["encoder"] for cell in report["steps"]] == ["mean", "mean"]
    assert report["padded_adam_fused"]
    assert report["histories"]["num_rows"] == 31
    assert report["histories"]["length_p50_p95_max"][2] <= 20


def test_sides_take_turns_and_ratios_are_of_tokens_a_second() -> None:
    order: list[str] = []

    class Counter:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> int:
            order.append(self.name)
            return 3

    laps = run_rounds({"a": Counter("a"), "b": Counter("b")}, 3, 0.0)
    assert "".join(order) == "aabb" + "aabb" + "bbaa" + "aabb"
    assert [lap.tokens for lap in laps["a"]] == [6, 6, 6]
    fast, slow = [Lap(2, 40, 1.0, 2.0)] * 3, [Lap(4, 20, 2.0, 2.0)] * 3
    assert (tokens_per_s(fast), step_s(slow)) == (40, 0.5)
    ratio = compare(fast, slow)
    assert (ratio.value, ratio.low, ratio.high, ratio.wall) == (4, 4, 4, 2)
