"""A run as one file: written by one process from a checkpoint of two ranks, and loaded by plain modules that give the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distrag.batching.collate import Collate
from distrag.checkpoint import load_checkpoint
from distrag.cli import main
from distrag.config import read_config
from distrag.data.store import open_store
from distrag.export import export_run, load_model
from distrag.training.build import build_job
from distrag.training.evaluate_run import find_part
from distrag.training.inputs import build_run_views
from distrag.training.loop import train
from distrag.world import start_world
from tests.embedding.test_tables import full_tables
from tests.ranks import run_ranks
from tests.training.runs import config, write_histories

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, dict[str, Any]] = {
    "next_item": {"train__refit": True, "tables__sharding": "column_wise", "tables__optimizer": "adagrad"},
    "conversion": {"loss__name": "binary", "encoder__name": "gru", "encoder__num_layers": None},
}


def sections(store: Path, run: Path, task: str) -> dict[str, Any]:
    found = config(store, run, train__num_epochs=1, tables__shard_rows=50, **CASES[task])
    if task == "conversion":
        found["data"] |= {"split": {"kind": "row", "valid_share": 0.2, "test_share": 0.2}}
    return {**found, "task": task}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each task on two ranks, one with sharded and replicated tables."""
    folder = tmp_path_factory.mktemp("export")
    store = write_histories(folder / "store")
    for task in CASES:
        run_ranks(lambda task=task: train(sections(store, folder / task, task)), 2)
    return folder


@pytest.mark.parametrize("task", CASES)
def test_plain_modules_give_the_numbers_of_the_sharded_model(runs: Path, tmp_path: Path, task: str) -> None:
    told = export_run(runs / task, tmp_path / "sub" / "model.safetensors")
    assert Path(told["checkpoint"]).name == ("refit" if task == "next_item" else "best")

    def score() -> tuple[np.ndarray, dict[str, np.ndarray]]:
        job = build_job(read_config(sections(runs / "store", tmp_path / "run", task)), start_world("cpu"))
        load_checkpoint(find_part(runs / task, "test"), job.parallel, None, job.world)
        job.parallel.model.eval()
        batch = job.collate(job.views["test"], np.arange(7) + 3 * job.world.rank, training=False)
        with torch.no_grad():
            found = job.parallel.plain.query(batch) if task == "next_item" else job.parallel.plain.predict(batch)
        return found.numpy(), full_tables(job.parallel.model)

    model = load_model(told["file"])
    settings = read_config(sections(runs / "store", tmp_path / "run", task))
    store = open_store(runs / "store")
    collate, views = Collate(store, settings.data, task=task), build_run_views(settings, store, (1.0, 0.0, 0.0))
    scored = run_ranks(score, 2)
    with torch.no_grad():
        for rank, (wanted, tables) in enumerate(scored):
            batch = collate(views["test"], np.arange(7) + 3 * rank, training=False)
            found = model.query(batch) if task == "next_item" else model.predict(batch)
            np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-6)
            for name, value in tables.items():
                plain = name.replace("tables.sharded.", "tables.replicated.")
                np.testing.assert_array_equal(model.state_dict()[plain].numpy(), value, err_msg=name)
    assert not model.training


def test_the_file_is_one_that_safetensors_itself_reads_and_says_what_it_is(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    main(["export", str(runs / "next_item"), "--out", str(path), "--checkpoint", "last"])
    tensors = load_file(path)
    assert {"tables.item.weight", "tables.kind.weight"} <= tensors.keys()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["config"])["model"]["dim"] == 8
    assert about["store_hash"] in about["schema"]
    assert about["checkpoint"].startswith("refit-step-")


@pytest.mark.parametrize(
    ("words", "part"), [(("--checkpoint", "best"), "/best)"), ((), "refit"), (("--checkpoint", "refit", "--json"), "refit")]
)
def test_the_command_says_what_it_wrote(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    main(["export", str(runs / "next_item"), "--out", str(tmp_path / "model.safetensors"), *words])
    assert part in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_loading_needs_neither_ranks_nor_the_run(runs: Path, tmp_path: Path) -> None:
    export_run(runs / "conversion", tmp_path / "model.safetensors")
    code = (
        "import torch, sys; from distrag.export import load_model; model = load_model(sys.argv[1]);"
        "assert not torch.distributed.is_initialized(); print(sum(p.numel() for p in model.parameters()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.safetensors")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(found.stdout) > 600


def test_what_cannot_be_exported_or_loaded_is_refused(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    for call, message in (
        (lambda: export_run(tmp_path, out), "No whole checkpoint"),
        (lambda: export_run(runs / "conversion", out, "refit"), "No whole checkpoint"),
        (lambda: export_run(tmp_path, out, "last"), "No whole checkpoint"),
        (lambda: export_run(runs / "conversion", out, "worst"), "No such checkpoint"),
        (lambda: export_run(runs / "conversion", runs / "store" / "schema.yaml" / "model"), "The export cannot be written"),
        (lambda: load_model(out), "The model cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not list(tmp_path.iterdir())
    out.write_bytes(b"no model")
    with pytest.raises(ValueError, match="The model cannot be read"):
        load_model(out)
    save_file({"a": torch.zeros(2)}, out)
    with pytest.raises(ValueError, match="Not an exported model"):
        load_model(out)
    export_run(runs / "conversion", out)
    with safe_open(out, framework="pt") as file:
        about = file.metadata()
    save_file({"tables.item.weight": torch.zeros(3, 8)}, out, metadata=about)
    with pytest.raises(ValueError, match=r"(?s)The file does not fit its config.*tables"):
        load_model(out)
