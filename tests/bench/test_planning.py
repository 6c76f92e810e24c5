"""The benches of the plan measure and print every cell; no test looks at how fast anything is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from distrag.bench.balance import measure, verdict
from distrag.bench.histories import draw_histories
from distrag.bench.ragged import write_histories
from distrag.bench.walk import Task, grouped_name, walk_grouped, walk_plan, walk_random
from distrag.cli import main
from distrag.cli.plans import BENCHES


def test_balance_of_steps_done_by_hand() -> None:
    lengths = np.array([4, 2, 2, 10, 1, 1])
    steps = [(np.array([0, 1, 2]), np.array([0, 1, 1])), (np.array([3, 4, 5]), np.array([1, 0, 0]))]
    even = measure(steps, lengths, (1.0, 0.0, 0.0), 2)
    assert even.cost.tolist() == even.tokens.tolist() == pytest.approx([1.0, 10 / 6])
    assert even.single.tolist() == [False, True]
    assert (even.most_tokens, even.step_tokens) == (10, 10)
    assert measure(steps, lengths, (0.0, 1.0, 0.0), 2).cost.tolist() == pytest.approx([16 / 12, 100 / 51])
    assert len(measure([], lengths, (1.0, 0.0, 0.0), 2).cost) == 0


def test_plan_balance_writes_and_prints_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_histories(draw_histories(200, 30, max_len=50), tmp_path / "films")
    words = ["--samples", "2e4", "--world-sizes", "2", "16", "--samples-a-rank", "256", "32", "--max-steps", "20"]
    main(["bench", "plan-balance", *words, "--store", str(tmp_path / "films"), "--json", str(tmp_path / "balance.json")])
    report = json.loads((tmp_path / "balance.json").read_text())
    cells = {(c["lengths"], c["world_size"], c["samples_a_rank"], c["dealing"]): c for c in report["cells"]}
    dealings = ("max_tokens", "global_tokens", "karmarkar_karp", "random")
    drawn = {(name, W, B, dealing) for name in ("zipf", "lognormal") for W in (2, 16) for B in (256, 32) for dealing in dealings}
    stored = {("films", W, B, dealing) for W in (2, 16) for B in (256, 32) for dealing in dealings[:2]} | {
        ("films", 2, 32, dealing) for dealing in dealings
    }
    assert set(cells) == drawn | stored
    for cell in cells.values():
        for what in ("cost", "tokens"):
            assert 1 <= cell[what]["mean"] <= cell[what]["p99"] + 1e-9 <= cell[what]["max"] + 2e-9
        assert 1 <= cell["steps_looked_at"] <= min(20, cell["num_steps"])
        if cell["dealing"] == "max_tokens":
            assert cell["fullest_rank_tokens"] <= cell["max_tokens"]
    for W, B in ((2, 256), (16, 32)):
        ours, theirs, random = (cells[("zipf", W, B, dealing)]["cost"]["mean"] for dealing in ("max_tokens", "karmarkar_karp", "random"))
        assert ours < random
        assert theirs < random
        assert verdict(cells[("zipf", W, B, "max_tokens")], "cost") == "yes"
    assert verdict(cells[("zipf", 16, 32, "random")], "cost") == "no"
    assert verdict(cells[("films", 16, 256, "max_tokens")], "cost") == "-"
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Cost:", "Tokens:", "zipf(1.2)", "films", "Karmarkar-Karp", report["machine"]["cpu"]))


def test_plan_speed_measures_each_sampler_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--samples", "2e4", "4e4", "--lengths", "short", "--world-size", "4", "--samples-a-rank", "32", "--others-up-to", "2e4"]
    main(["bench", "plan-speed", *words, "--json", str(tmp_path / "speed.json")])
    report = json.loads((tmp_path / "speed.json").read_text())
    cells = {(cell["sampler"], cell["num_samples"]): cell for cell in report["cells"]}
    assert set(cells) == {(name, n) for name in ("distrag", "torch RandomSampler", grouped_name()) for n in (20_000, 40_000)}
    assert {key for key, cell in cells.items() if cell["extrapolated"]} == {
        key for key in cells if key[0] != "distrag" and key[1] == 40_000
    }
    for cell in cells.values():
        assert set(cell["construct_s"]) == {"cpu", "wall"}
        assert 0 < cell["first_step_s"]["wall"] <= 1e-9 * cell["epoch_ns_a_sequence"]["wall"] * cell["num_samples"]
        assert cell["resume_from_nothing_s"]["wall"] >= cell["resume_s"]["wall"] > 0
        assert cell["peak_mb"] is not None
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("construct s", "epoch ns/seq", "MB", "scaled up", "0.02 M", "0.04 M"))


def test_all_walks_visit_every_sequence(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 5_000).astype(np.int32)
    lengths.tofile(tmp_path / "lengths")
    task = Task(str(tmp_path / "lengths"), 5_000, world_size=2, samples_a_rank=100, cost=(1.0, 0.01, 0.0), repeats=1)
    assert walk_random(task).num_steps == walk_grouped(task).num_steps == 25
    walk = walk_plan(task)
    assert 25 <= walk.num_steps <= 27
    assert math.isnan(walk.peak_bytes) or walk.peak_bytes >= 0


@pytest.mark.parametrize("which", sorted(BENCHES))
def test_every_bench_has_a_help_of_its_own(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *which.split(), "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"usage: distrag bench {which}".strip() in text
    assert BENCHES[which] in text
    assert which or all(f"distrag bench {name}" in text for name in BENCHES)


@pytest.mark.parametrize("word", ["0", "1.5", "many", "-3", "inf", "nan"])
def test_a_number_that_is_no_count_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    for bench in ("plan-balance", "plan-speed"):
        with pytest.raises(SystemExit) as caught:
            main(["bench", bench, f"--samples={word}"])
        assert caught.value.code == 2
        assert "wanted a whole number of at least 1" in capsys.readouterr().err
