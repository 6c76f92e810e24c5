"""`distrag verify`: a config trained here on several numbers of ranks and without sharding, and what makes them differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distrag.cli import main
from distrag.encoder import ENCODERS
from distrag.encoder.mean import Mean
from distrag.training.verify import verify
from distrag.training.verify_text import describe_verify
from tests.exact.cases import build_store
from tests.training import wrong_encoders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("verify") / "store")


def config(store: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "data": {"path": str(store), "max_len": 20},
        "batching": {"global_tokens": 60},
        "model": {"dim": 8},
        "encoder": {"name": "gru", "dropout": 0.2},
        "loss": {"name": "sampled_softmax", "num_negatives": 8},
        "tables": {"shard_rows": 20},
        "optim": {"lr": 0.002},
        "train": {"num_epochs": 3, "run_dir": str(run_dir), "device": "cpu"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section] = {**sections[section], name: value}
    return sections


def test_a_config_is_equal_on_two_ranks_and_unsharded_and_its_run_directory_stays_untouched(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes: dict[str, Any] = {"batching__global_tokens": None, "batching__max_tokens": 60, "batching__max_samples": 2}
    changes |= {"optim__warmup_steps": 1000, "optim__schedule": "cosine", "train__precision": "bf16", "train__patience": 1}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config(store, tmp_path / "run", **changes)))
    main(["verify", "c.yaml", "--steps", "9", "--json", "--encoder.name=sasrec"])
    numbers = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"]
    assert numbers["exact"]
    assert len(numbers["losses"]) == 9
    assert [(row["name"], row["exact"], row["note"]) for row in numbers["rows"]] == [
        ("unsharded, 1 process", True, ""),
        ("2 ranks", True, ""),
    ]
    assert max(row[key] for row in numbers["rows"] for key in ("loss", "dense", "tables")) <= 1e-6
    assert min(numbers["moved"].values()) > 1e-3, "something was trained"
    assert [change.split(":")[0] for change in numbers["changed"]] == [
        "batching.global_tokens null -> 60",
        "batching.max_samples 2 -> null",
        "optim.warmup_steps 1000 -> 0",
        "optim.schedule cosine -> constant",
        "optim.eps 1e-08 -> 1e-05",
        "train.precision bf16 -> fp32",
    ]
    assert "equal within 1e-06" in describe_verify(numbers)


@pytest.mark.parametrize("name", ["Leaks", "KnowsItsRank", "Draws"])
def test_an_encoder_that_leaks_between_samples_or_depends_on_the_rank_is_caught(
    name: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENCODERS, "wrong", getattr(wrong_encoders, name))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config(store, tmp_path / "run", encoder__name="wrong", tables__optimizer="sgd")))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path / "c.yaml"), "--steps", "3", "--world-sizes", "2"])
    assert end.value.code == 1
    out = capsys.readouterr().out
    wrong = {"Leaks": "2 ranks", "KnowsItsRank": "2 ranks", "Draws": "unsharded, 1 process, 2 ranks"}
    assert f"NOT EQUAL within 1e-06: {wrong[name]}." in out, out
    assert "losses part at step 1" in out, "the very first forward differs"


def test_the_error_of_a_rank_is_told_with_its_number(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "wrong", wrong_encoders.Fails)
    with pytest.raises(ValueError, match=r"(?s)A rank failed\n.*rank 1: bad row 17.*2 ranks that train"):
        verify(config(store, tmp_path / "run", encoder__name="wrong"), [2], steps=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-sizes", "0"], "(?s)out of range.*0.*at least 1 and at most 64"),
        (["--world-sizes", "1,x"], "(?s)Not a list of numbers.*1,x"),
        (["--world-sizes", ","], "No number of ranks"),
        (["--steps", "0"], "(?s)out of range.*--steps"),
        (["--tolerance", "nan"], "(?s)out of range.*nan.*--tolerance"),
        (["--tabels.sharding=row_wise"], "(?s)unknown config key.*tables.sharding"),
        (
            ["--tables.sharding=column_wise", "--tables.optimizer=sgd", "--world-sizes", "2,3,5"],
            "(?s)3 ranks: .*multiple of 12.*; 5 ranks.*1, 2",
        ),
        (["--tables.sharding=column_wise"], "(?s)column_wise keeps one row-wise Adagrad state per shard.*adagrad or sgd"),
        (["--tables.optimizer=adam"], "(?s)No such fused optimizer.*adam on cpu"),
        (["--data.max_len=2000"], "(?s)token budget is smaller"),
        (["--data.path=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_starts(
    words: list[str], message: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distrag.training.verify.run_local_ranks", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config(store, tmp_path / "run", tables__shard_rows=1)))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path / "c.yaml"), *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert [line.split(":")[0].strip() for line in error.splitlines()[1:5]] == ["got", "wanted", "where", "to do"], error


def test_ranks_of_a_launcher_do_not_each_start_ranks(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"(?s)verify starts its own ranks.*2 processes"):
        verify(config(store, tmp_path / "run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_there_are_asked_for_in_vain(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)Not enough GPUs.*0 GPUs.*4, one for each rank"):
        verify(config(store, tmp_path / "run", train__device="cuda"), [4])


def test_an_encoder_that_other_processes_cannot_import_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Mean):
        pass

    monkeypatch.setitem(ENCODERS, "local", Local)
    with pytest.raises(ValueError, match=r"(?s)Ranks cannot be given this encoder.*'local'.*top level of a module"):
        verify(config(store, tmp_path / "run", encoder__name="local"), [1])
