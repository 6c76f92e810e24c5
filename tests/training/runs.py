"""Runs for the tests of resuming: a store, a config, what a run wrote, and ranks that are cut at a chosen moment."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distrag.data.write import write_store
from distrag.training.loop import train
from tests.ranks import RankError, run_ranks

Lines = list[dict[str, Any]]


def write_histories(path: Path, num_samples: int = 120, seed: int = 5) -> Path:
    """Writes a store of uneven histories, empty ones among them; returns its folder."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 25, num_samples)
    lengths[:3] = 0, 25, 1
    total = int(lengths.sum())
    history = {"item": random.zipf(1.4, total) % 60, "kind": random.integers(0, 7, total)}
    write_store(path, history=history, offsets=np.concatenate([[0], lengths.cumsum()]), label=np.arange(num_samples) % 2)
    return path


def config(store: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Returns a config with everything that a resume has to carry on: dropout, negatives, two kinds of tables, two optimizers."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": str(store), "max_len": 20},
        "batching": {"global_tokens": 120},
        "model": {"dim": 8},
        "encoder": {"name": "sasrec", "num_layers": 1, "dropout": 0.3},
        "loss": {"name": "sampled_softmax", "num_negatives": 4},
        "tables": {"shard_rows": 20},
        "optim": {"lr": 0.01, "warmup_steps": 4, "schedule": "cosine"},
        "train": {"num_epochs": 2, "log_every": 1, "run_dir": str(run_dir), "device": "cpu", "tensorboard": False, "log_samples": True},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section][name] = value
    return sections


def read_lines(path: Path) -> Lines:
    """Returns the JSON lines of a file, whole ones only; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses_of(run_dir: Path, kind: str = "train") -> list[tuple[int, float]]:
    """Returns step and loss of every line of metrics."""
    return [(line["step"], line["loss"]) for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == kind]


def samples_of(run_dir: Path, kind: str = "train") -> dict[int, list[list[int]]]:
    """Returns the sorted samples of each step, over all ranks, in order of steps, by epoch."""
    steps: dict[tuple[int, int], list[int]] = {}
    for path in sorted((run_dir / "samples").glob("rank-*.jsonl")):
        for line in read_lines(path):
            if line["kind"] == kind:
                steps.setdefault((line["epoch"], line["step"]), []).extend(line["samples"])
    epochs: dict[int, list[list[int]]] = {}
    for (epoch, _step), samples in sorted(steps.items()):
        epochs.setdefault(epoch, []).append(sorted(samples))
    return epochs


def faults_of(run_dir: Path, num_samples: int, num_epochs: int) -> list[str]:
    """Returns what is wrong with the multiset of trained samples: each has to be there once an epoch."""
    faults, epochs = [], samples_of(run_dir)
    for epoch in range(num_epochs):
        counts = Counter(sample for samples in epochs.get(epoch, []) for sample in samples)
        lost, again = [s for s in range(num_samples) if s not in counts], [s for s, count in counts.items() if count > 1]
        if lost or again or len(counts) != num_samples:
            faults.append(f"epoch {epoch}: {len(lost)} lost, {len(again)} repeated of {num_samples}")
    return faults


def train_and_die(sections: dict[str, Any], is_time: Callable[[], bool], victim: int = 0) -> Any:
    """Trains on this rank; `victim` is killed with signal 9 as soon as `is_time()`, and the others with it."""

    def watch() -> None:
        while not is_time():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=watch, daemon=True).start()
    return train(sections)


def cut(sections: dict[str, Any], world_size: int, is_time: Callable[[], bool], victim: int = 0) -> bool:
    """Trains on real ranks until all are killed; returns whether they were, and False for a run that ended before."""
    try:
        run_ranks(train_and_die, world_size, sections, is_time, victim)
    except RankError as error:
        if "SIGKILL" not in str(error):
            raise
        return True
    return False


class Reaches:
    """A test whether a run, not the one that it goes on from, has logged so much.

    Args:
        run_dir: folder of the run.
        amount: how much.
        kind: of the lines that count.
        unit: `step`, or `samples` trained in all.
    """

    def __init__(self, run_dir: Path, amount: float, kind: str = "train", unit: str = "step") -> None:
        self.path, self.amount, self.kind, self.unit = run_dir / "metrics.jsonl", amount, kind, unit
        self.before = self.path.stat().st_ino if self.path.exists() else 0
        self.file = self.at = self.reached = 0

    def __call__(self) -> bool:
        """Reads what was written since the last call."""
        try:
            file = self.path.stat().st_ino
            if file == self.before:  # what a resume keeps is written anew, to another file
                return False
            if file != self.file:
                self.file, self.at, self.reached = file, 0, 0
            with self.path.open("rb") as lines:
                lines.seek(self.at)
                text = lines.read()
        except OSError:
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line["kind"] == self.kind:
                self.reached = line["step"] if self.unit == "step" else self.reached + line["samples"]
        return self.reached >= self.amount
