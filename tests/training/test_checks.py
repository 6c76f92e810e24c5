"""What `distrag train` refuses is refused by `distrag plan`, for any number of ranks and without one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrag.config import read_config
from distrag.data.write import write_store
from distrag.training.checks import check_run_dir
from distrag.training.plan import plan_run
from distrag.training.plan_text import describe_plan


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checks") / "store"
    time = np.arange(12)
    write_store(
        path,
        history={"item": np.arange(12) % 5 + 1, "seen": time, "read": time},
        offsets=[0, 4, 4, 9, 12],
        context={"since": np.arange(4)},
        label=[0, 1, 0, 1],
        features={"seen": {"kind": "time"}, "read": {"kind": "time", "gap": "log"}, "since": {"kind": "time"}},
    )
    return path


def plan(store: Path, world_size: int = 2, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"data": {"path": str(store), "max_len": 8}, "model": {"dim": 8}, "train": {"max_steps": 3, "device": "cpu"}}
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return plan_run(read_config({**base, **merged}), world_size)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"encoder": {"name": "self_attention"}}, "(?s)sees the future.*self_attention with next_item"),
        ({"encoder": {"num_heads": 3}}, "(?s)heads"),
        ({"encoder": {"activation": "tanh"}}, "(?s)not known.*tanh"),
        ({"loss": {"name": "full_softmax"}, "tables": {"shard_rows": 1}}, "(?s)full_softmax needs the whole item table"),
        ({"loss": {"name": "binary"}}, "(?s)loss does not fit the task"),
        ({"tables": {"max_gib_per_rank": 1e-7}}, "(?s)tables do not fit.*item: 6 x 8"),
        ({"tables": {"max_gib_per_rank": 1e-3}, "model": {"dim": 256}}, "(?s)dense part does not fit.*parameters"),
        ({"tables": {"per_table": {"itme": "row_wise"}}}, "(?s)A table that does not exist.*itme"),
        ({"tables": {"per_table": {"item": "rows"}}}, "(?s)An unknown sharding.*rows"),
        ({"tables": {"shard_rows": 1, "optimizer": "adam"}}, "(?s)No such fused optimizer.*adam on cpu"),
        ({"tables": {"shard_rows": 1}, "model": {"dim": 6}}, "(?s)model.dim 6, row_wise.*4 or 8.*table 'item'"),
        (
            {"tables": {"shard_rows": 1, "sharding": "column_wise", "optimizer": "adagrad"}, "model": {"dim": 12}},
            "(?s)model.dim 12, column_wise on 2 ranks.*8 or 16.*table 'item'",
        ),
        ({"tables": {"shard_rows": 1, "sharding": "column_wise"}}, "(?s)other mathematics"),
        ({"data": {"history": ["item", "seen"]}}, "(?s)would not read.*seen.*'item', 'read'"),
        ({"data": {"context": ["since"]}}, "(?s)would not read.*since"),
        ({"data": {"target": "read"}}, "(?s)predicts an id feature.*read"),
        ({"train": {"max_steps": 0}}, "(?s)The run has no length"),
        ({"task": "conversion"}, "(?s)split does not fit the task"),
    ],
)
def test_a_plan_refuses_what_training_refuses(store: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(store, **sections)


def test_widths_that_a_table_cannot_have_are_fine_where_it_is_replicated(store: Path) -> None:
    assert plan(store, model={"dim": 6})["tables"]
    tables = {"shard_rows": 1, "sharding": "column_wise", "optimizer": "adagrad"}
    assert plan(store, 4, model={"dim": 16}, tables=tables)["tables"]


def test_a_plan_says_what_of_the_store_stays_unread(store: Path) -> None:
    numbers = plan(store)
    assert numbers["features_read"] == ["history item", "history read"]
    assert numbers["features_left_out"] == ["history seen", "context since"]
    assert "history seen, context since" in describe_plan(numbers)
    assert numbers["num_steps_of_run"] == 3


@pytest.mark.parametrize("world_size", [0, -1, 10**12])
def test_worlds_that_cannot_be_are_refused(store: Path, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"(?s)out of range.*--world-size"):
        plan(store, world_size)


def test_a_feature_of_both_places_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store", history={"item": np.ones(2, int)}, offsets=[0, 2], context={"item": np.ones(1, int)})
    with pytest.raises(ValueError, match=r"(?s)both history and context.*item"):
        plan(tmp_path / "store")


def test_a_run_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "runs" / "one"):
        with pytest.raises(ValueError, match=r"(?s)cannot be made.*file is no folder.*train.run_dir"):
            check_run_dir(run_dir)
    check_run_dir(tmp_path / "new" / "run")
    check_run_dir(tmp_path)
