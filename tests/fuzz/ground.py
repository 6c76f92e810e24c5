"""Builds the good input: histories, events, a store, a finished run; training it compiles everything once, before any fork."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distrag.cli import main
from distrag.data.prepare import prepare
from distrag.training.loop import train
from tests.fuzz.case import Ground

NUM_USERS = 160


def build_ground(folder: Path) -> Ground:
    """Returns the good input, made in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    table = draw_histories(NUM_USERS)
    pq.write_table(table, folder / "histories.parquet")
    (folder / "events.csv").write_text(draw_events(40))
    prepare(folder / "histories.parquet", folder / "store", schema=_write_schema(folder / "features.yaml"))
    ground = Ground(folder / "store", folder / "run", folder / "histories.parquet", folder / "events.csv")
    for task, run in (("next_item", ground.run), ("conversion", folder / "other-run")):
        train(good_config(ground.store, run, task=task))
    _warm_up(ground, folder)
    return ground


def _warm_up(ground: Ground, folder: Path) -> None:
    """Imports and compiles what the other commands need, so that no case pays for it."""
    for name in ("bench.balance", "bench.command", "bench.ranks", "bench.speed", "report.page", "training.calibrate", "training.memory"):
        importlib.import_module(f"distrag.{name}")
    for words in (
        ["stats", str(ground.store), "--verify", "--json"],
        ["plan", str(ground.run / "config.yaml"), "--json"],
        ["evaluate", str(ground.run), "--json"],
        ["evaluate", "--popularity", "all", "--data", str(ground.store)],
        ["prepare", str(ground.csv), "--out", str(folder / "events-store")],
    ):
        main(words)


def good_config(store: Path, run_dir: Path, task: str = "next_item") -> dict[str, Any]:
    """Returns a config that trains two small steps."""
    tree: dict[str, Any] = {
        "task": task,
        "data": {"path": str(store), "max_len": 12},
        "batching": {"max_tokens": 400},
        "model": {"dim": 8},
        "encoder": {"name": "gru" if task == "conversion" else "sasrec", "num_layers": 1},
        "tables": {"shard_rows": 20},
        "train": {"num_epochs": 1, "max_steps": 2, "log_every": 1, "run_dir": str(run_dir), "device": "cpu", "tensorboard": False},
    }
    if task == "conversion":
        tree["data"]["split"] = {"kind": "row"}
    else:
        tree["loss"] = {"name": "sampled_softmax", "num_negatives": 4}
    return tree


def draw_histories(num_users: int, seed: int = 3) -> pa.Table:
    """Returns one row a user: lists of ids as text and as integers, numbers and times, and ids, numbers, label and weight a row."""
    r = random.Random(seed)
    lengths = [0, 1, 2, 30, *(r.randint(0, 18) for _ in range(num_users - 4))]
    return pa.table(
        {
            "user_id": list(range(num_users)),
            "item_id": [[f"film-{min(r.randint(0, 40), r.randint(0, 40))}" for _ in range(n)] for n in lengths],
            "shop": pa.array([[r.randint(1, 300) for _ in range(n)] for n in lengths], pa.list_(pa.int64())),
            "price": pa.array([[r.random() * 90 for _ in range(n)] for n in lengths], pa.list_(pa.float32())),
            "timestamp": pa.array(
                [sorted(1_700_000_000 + r.randint(0, 9_000_000) for _ in range(n)) for n in lengths], pa.list_(pa.int64())
            ),
            "city": [r.randint(1, 5) for _ in lengths],
            "age": [r.random() * 60 for _ in lengths],
            "label": [r.randint(0, 1) for _ in lengths],
            "weight": [0.5 + r.random() for _ in lengths],
        }
    )


def draw_events(num_users: int, seed: int = 4) -> str:
    """Returns a CSV of events."""
    r = random.Random(seed)
    lines = [f"u{r.randint(0, num_users)},{r.randint(1, 30)},{1_600_000_000 + r.randint(0, 10**7)},{r.random():.3f}" for _ in range(400)]
    return "user_id,item_id,timestamp,price\n" + "\n".join(lines) + "\n"


def _write_schema(path: Path) -> Path:
    path.write_text(
        "history: {item_id: id, shop: id, price: number, timestamp: {kind: time, gap: bucket}}\n"
        "context: {city: id, age: number}\nlabel: label\nweight: weight\nkey: user_id\n"
    )
    return path
