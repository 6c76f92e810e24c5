"""`distrag plan` as a user types it: lines, JSON, the files it leaves, and mistakes in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from distrag.cli import main
from tests.batching.stores import lengths_store
from tests.test_cli import call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    store = lengths_store(folder, [5 + n * 7 % 40 for n in range(400)])
    tree = {
        "data": {"path": str(store.path), "max_len": 50},
        "batching": {"max_tokens": 400},
        "model": {"dim": 16},
        "encoder": {"name": "gru"},
        "train": {"num_epochs": 1, "device": "cpu", "run_dir": str(folder / "run"), "tensorboard": False},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    return folder / "c.yaml"


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main(["plan", *map(str, words)])
    return capsys.readouterr().out


def test_a_plan_for_many_ranks_is_printed_as_lines_and_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(printed(capsys, run, "--world-size", 256, "--ranks-per-node", 4, "--json", "--batching.max_tokens=50"))
    assert numbers["world_size"] == 256
    assert len(numbers["torchrec"]["tables"]) == 1
    text = printed(capsys, run, "--world-size", 256, "--planner-seconds", 0, "--batching.max_tokens=50")
    assert "TorchRec's planner: not asked" in text
    assert "memory of the fullest" in text


def test_calibrate_and_then_plan_by_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(printed(capsys, run, "--calibrate", "--json"))
    assert (run.parent / "run" / "cost.json").exists()
    assert json.loads(printed(capsys, run, "--json", "--planner-seconds", 0))["cost"] == numbers["cost"]


def test_a_budget_under_a_limit(run: Path) -> None:
    """In a process of its own: trials are forked from a server that must not run the command again."""
    text = call("plan", run, "--max-memory", "16GiB")
    assert "the whole train view fits on one rank" in text
    assert "set               batching: {max_tokens: " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-memory", "1.7"], "Not an amount of memory"),
        (["--max-memory", "abc"], "Not an amount of memory"),
        (["--max-memory", "0"], "Not an amount of memory"),
        (["--max-memory", "-1"], "Not an amount of memory"),
        (["--max-memory", "30MiB"], "Not even the smallest budget fits"),
        (["--max-memory", "0.5", "--calibrate"], "not allowed with argument"),
        (["--max-memory", "0.5", "--batching.max_tokens=20"], "smaller than one sequence"),
        (["--calibrate", "--world-size", "0"], "--world-size"),
        (["--world-size", "100000"], "--world-size"),
        (["--world-size", "4", "--ranks-per-node", "9"], "--ranks-per-node"),
        (["--planner-seconds", "-3"], "--planner-seconds"),
        (["--batching.cost=[1, 2]"], "cost"),
    ],
)
def test_mistakes_end_in_one_clear_message(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", str(run), *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
