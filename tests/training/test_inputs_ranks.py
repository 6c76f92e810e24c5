"""What reaches the tables is the same on every rank: one store, ids inside their tables, int64 under keys in one order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distrag.batching.collate import Collate
from distrag.config import read_config
from distrag.data.content import SAMPLES
from distrag.data.store import Store, open_store
from distrag.data.write import write_store
from distrag.embedding.tables import Tables
from distrag.training.checks import check_job
from distrag.training.inputs import build_run_views
from distrag.training.loop import train
from tests.ranks import run_ranks
from tests.training.runs import config, write_histories


def refusal(sections: dict[str, Any], paths: tuple[Path, ...] = ()) -> str:
    """Trains; returns what this rank refuses, with its own store where `paths` names one for each."""
    if paths:
        sections["data"]["path"] = str(paths[int(os.environ["RANK"])])
    try:
        train(sections)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_another_store_each_are_refused_before_they_plan(tmp_path: Path) -> None:
    paths = write_histories(tmp_path / "a"), write_histories(tmp_path / "b", seed=6)
    told = run_ranks(refusal, 2, config(paths[0], tmp_path / "run"), paths)
    assert all("The ranks have different stores" in text and "on rank 1" in text and "to do:" in text for text in told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("row", [1, 119])
def test_an_id_that_no_table_has_is_told_on_all_ranks_before_the_first_step(tmp_path: Path, row: int) -> None:
    path = write_histories(tmp_path / "store")
    store = open_store(path)
    values = store.position("item").copy()
    raw = (path / SAMPLES).read_bytes()
    start = raw.index(values.tobytes())
    at = start + int(store.offsets[row])
    (path / SAMPLES).write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    told = run_ranks(refusal, 2, config(path, tmp_path / "run"))
    assert all(f"sample {row}, position 0" in text and "An id is outside its table" in text for text in told)
    assert not (tmp_path / "run").exists()


DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")


def mixed_store(folder: Path) -> Store:
    rows = 40
    lengths = np.arange(rows) % 5
    total = int(lengths.sum())
    history = {name: 1 + np.arange(total) % top for name, top in (("narrow", 200), ("wide", 300), ("wider", 70_000))}
    context = {"city": 1 + np.arange(rows) % 3}
    return write_store(
        folder / "store",
        history=history,
        context=context,
        offsets=np.concatenate([[0], lengths.cumsum()]),
        tables={"wide": 301, "wider": 70_001},
    )


def build(store: Store, history: list[str], types: dict[str, str]) -> list[tuple[list[str], list[int], list[int], set[torch.dtype]]]:
    """Returns keys, values, lengths and types of two batches, of a store whose columns have other integer types."""
    columns = {name: values.astype(types.get(name, values.dtype)) for name, values in store.columns.items()}
    run = read_config({"data": {"path": str(store.path), "history": history}, "tables": {"shard_rows": 250}, "model": {"dim": 8}})
    checked = check_job(run, store.schema, 1, device="cpu", limit_bytes=None)
    order = Tables(checked.specs, checked.shardings, 8, init_std=0.1, seed=0).key_order
    assert order == [*(key for key in order if key.startswith("wide")), *(key for key in order if not key.startswith("wide"))]
    data = replace(store, columns=columns)
    view = build_run_views(run, store, (1.0, 0.0, 0.0))["train"]
    collate = Collate(data, run.data, task="next_item", negatives="per_position", num_negatives=2, seed=3, key_order=order)
    batches = [collate(view, np.array(samples, kind)) for samples, kind in (([3, 0, 9], np.int32), ([], np.int64))]
    assert all(list(b.ids.keys()) == order for b in batches)
    return [
        (
            list(b.ids.keys()),
            b.ids.values().tolist(),
            b.ids.lengths().tolist(),
            {b.ids.values().dtype, b.ids.lengths().dtype, b.offsets.dtype, b.samples.dtype},
        )
        for b in batches
    ]


def test_ids_are_int64_under_keys_in_one_order_whatever_the_columns_hold(tmp_path: Path) -> None:
    store = mixed_store(tmp_path)
    assert [store.position(name).dtype.name for name in ("narrow", "wide", "wider")] == ["uint8", "uint16", "uint32"]
    wanted = build(store, ["narrow", "wide", "wider"], {})
    assert all(types == {torch.int64} for *_, types in wanted)
    for name, dtype in (("history:narrow", "int32"), ("history:wide", "uint32"), ("history:wider", "int64"), ("context:city", "int32")):
        assert build(store, ["narrow", "wide", "wider"], {name: dtype}) == wanted


def _on_rank(store: Path) -> list[Any]:
    rank = int(os.environ["RANK"])
    return build(
        open_store(store),
        ["narrow", "wide", "wider"],
        {"history:narrow": DTYPES[rank], "history:wide": DTYPES[rank + 1], "context:city": DTYPES[-1 - rank]},
    )


def test_ranks_whose_columns_differ_in_type_send_the_same_types_in_the_same_order(tmp_path: Path) -> None:
    found = run_ranks(_on_rank, 2, mixed_store(tmp_path).path)
    assert found[0] == found[1]
