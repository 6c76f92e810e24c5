"""The page is written from what a run left, or says which file of it is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distrag.report.page import write_report

RESULT = {
    **{"num_steps": 2, "num_epochs": 1, "best_step": 2, "world_size": 1, "device": "cpu", "seconds": 1.5},
    **{"valid": {"auc": 0.5}, "test": {"auc": None, "users": 7}, "num_samples": {"train": 3}, "num_cut": {"train": 0}},
}
LINES = [{"kind": "train", "step": 1, "loss": 0.5, "lr": float("nan")}, {"kind": "valid", "step": 1, "auc": 0.5, "<b>": 1}]


def run_dir(folder: Path) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "result.json").write_text(json.dumps(RESULT))
    (folder / "config.yaml").write_text("task: <script>\n")
    return folder


def test_what_a_run_wrote_is_shown_and_nothing_of_it_is_markup(tmp_path: Path) -> None:
    page = write_report(run_dir(tmp_path / "<i>")).read_text()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "<i>" not in page
    assert "2 steps in 1 epochs" in page
    (tmp_path / "<i>" / "result.json").unlink()
    assert "Not finished" in write_report(tmp_path / "<i>").read_text()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", b"[1]\n", "A line of the metrics is none(.|\n)*metrics.jsonl, line 1"),
        ("metrics.jsonl", b'{"kind": "train", "step": 1}\n{"ki', "A line of the metrics cannot be read(.|\n)*line 2"),
        ("metrics.jsonl", b'{"kind": 3, "step": 1}\n', "A line of the metrics is none"),
        ("metrics.jsonl", b'{"kind": "train", "step": true}\n', "A line of the metrics is none"),
        ("metrics.jsonl", b'{"kind": "train", "step": ' + b"9" * 400 + b"}\n", "A line of the metrics is none"),
        ("metrics.jsonl", b"\xff\xfe", "A line of the metrics cannot be read"),
        ("metrics.jsonl", b"[" * 100_000, "A line of the metrics cannot be read"),
        ("result.json", b"[]", "Not the result of a run"),
        ("result.json", b"{}", "Not the result of a run(.|\n)*num_steps"),
        ("result.json", json.dumps({**RESULT, "seconds": "x"}).encode(), "seconds missing or wrong"),
        ("result.json", json.dumps({**RESULT, "num_cut": {"train": "x"}}).encode(), "num_cut missing or wrong"),
        ("result.json", b"{", "The result of the run cannot be read"),
        ("config.yaml", None, "A file of the run cannot be read(.|\n)*config.yaml"),
        ("metrics.jsonl", None, "No run in this folder"),
    ],
)
def test_files_that_no_run_wrote_are_named(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    run = run_dir(tmp_path / "run")
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    with pytest.raises(ValueError, match=told) as caught:
        write_report(run)
    assert "to do:" in str(caught.value)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "config.yaml"])
def test_pipes_and_folders_in_place_of_files_are_not_waited_for(tmp_path: Path, name: str) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        run = run_dir(tmp_path / str(number))
        (run / name).unlink()
        make(run / name)
        with pytest.raises(ValueError, match=r"cannot be read|No run in this folder"):
            write_report(run)


def test_odd_values_of_a_line_are_left_out_of_the_curves(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    odd = [{"kind": "train", "step": 2, "loss": value} for value in ("x", [], {}, None, True, float("inf"), 10**400)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in odd)
    (run / "result.json").write_text(json.dumps({**RESULT, "test": {"auc": "<b>", "ne": [1]}}))
    assert "<b>" not in write_report(run).read_text()


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    (run / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"The page cannot be written(.|\n)*report.html"):
        write_report(run)
