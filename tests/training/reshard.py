"""Takes a run over to other ranks and another sharding, and shows how far weights, optimizer state and the next ten losses are off.

`python -m tests.training.reshard` prints the table; the exit code is 1 when anything that carries over is off by more than 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distrag.checkpoint import find_checkpoint, find_newest, load_checkpoint, save_checkpoint
from distrag.checkpoint.tensors import read_metadata, read_whole
from distrag.config import read_config
from distrag.training.build import build_job
from distrag.training.loop import train
from distrag.training.optim import build_optimizer
from distrag.world import World, start_world
from tests.ranks import run_ranks
from tests.training.runs import config, losses_of, write_histories

STEPS, MORE = 12, 10
EVEN = {"optim__lr": 0.05, "optim__table_lr": 0.05, "tables__eps": 1e-10, "tables__replicated_optimizer": "adagrad"}
"""With these a replicated table is trained exactly as a sharded one."""
ADAGRAD = {"tables__optimizer": "adagrad", **EVEN}


@dataclass(frozen=True)
class Case:
    """One move.

    Attributes:
        before: number of ranks, and keys of `tables` (sharding and the like) of the run that is saved.
        after: the same of the run that goes on.
        keys: keys of both.
        anew: whether an optimizer has to start anew, so that later losses may differ.
    """

    before: tuple[int, dict[str, Any]]
    after: tuple[int, dict[str, Any]]
    keys: dict[str, Any] = field(default_factory=dict)
    anew: bool = False

    def __str__(self) -> str:
        return " -> ".join(f"{size} {' '.join(map(_say, keys.items())) or 'row_wise'}" for size, keys in (self.before, self.after))


def _say(item: tuple[str, Any]) -> str:
    key, value = item
    named = ", ".join(f"{table} {how}" for table, how in value.items()) if isinstance(value, dict) else value
    return f"shard_rows {value}" if key.endswith("shard_rows") else str(named)


def kept(sharding: str) -> dict[str, Any]:
    """Returns the key of a sharding."""
    return {"tables__sharding": sharding}


def _all_shardings() -> list[Case]:
    names = ("row_wise", "table_wise", "column_wise", "replicated")
    return [Case((2, kept(a)), (2, kept(b)), ADAGRAD) for a in names for b in names if a != b]


CASES = [
    *(Case((a, {}), (b, {})) for a, b in ((2, 1), (1, 2), (2, 4), (4, 3))),
    Case((2, kept("row_wise")), (2, kept("table_wise"))),
    Case((2, kept("table_wise")), (2, kept("row_wise"))),
    *_all_shardings(),
    Case((2, kept("column_wise")), (1, kept("row_wise")), ADAGRAD),
    Case((4, kept("row_wise")), (3, kept("table_wise"))),
    Case((2, kept("row_wise")), (3, kept("table_wise")), {"tables__optimizer": "sgd"}),
    Case((2, {"tables__shard_rows": 5}), (2, {"tables__shard_rows": 1000}), ADAGRAD),
    Case((1, {"tables__per_table": {"kind": "table_wise"}}), (2, {"tables__per_table": {"item": "column_wise"}}), ADAGRAD),
    Case((2, kept("row_wise")), (2, kept("replicated")), anew=True),
    Case((2, kept("replicated")), (2, kept("row_wise")), anew=True),
]


def move(case: Case, store: Path, folder: Path) -> dict[str, float]:
    """Returns the largest differences of one move: `parameters`, `states`, `losses`, and how many states were carried over."""
    length = {"optim__schedule": "constant", "train__save_every": STEPS, "train__num_epochs": 0, **case.keys}
    run, whole, again = folder / "run", folder / "whole", folder / "again"
    (size, before), (other, after) = case.before, case.after
    run_ranks(train_quietly, size, config(store, whole, train__max_steps=STEPS + MORE, **length, **before))
    run_ranks(train_quietly, size, config(store, run, train__max_steps=STEPS, **length, **before))

    def take_over() -> None:
        job = build_job(read_config(config(store, run, **length, **after)), start_world("cpu"))
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        found = find_newest(run / "checkpoints", job.world)
        assert found is not None
        load_checkpoint(found, job.parallel, optimizer, job.world)
        save_checkpoint(again / "step-1", job.parallel, optimizer, {}, job.world)

    run_ranks(take_over, other)
    saved, loaded = (read_tensors(path) for path in (run / "checkpoints" / f"step-{STEPS}", again / "step-1"))
    both = saved.keys() & loaded.keys()
    off = {name: float((saved[name].double() - loaded[name].double()).abs().max()) for name in both}
    states = [value for name, value in off.items() if name.startswith("optim.")]
    run_ranks(train_quietly, other, config(store, run, train__max_steps=STEPS + MORE, train__resume=True, **length, **after))
    losses = [abs(a[1] - b[1]) for a, b in zip(losses_of(run), losses_of(whole), strict=True)][STEPS:]
    assert len(losses) == MORE
    assert {name for name in saved if name.startswith("model.")} == {name for name in loaded if name.startswith("model.")}
    model = max(value for name, value in off.items() if name.startswith("model."))
    lost = sum(name.startswith("optim.") for name in saved.keys() - both)
    return {"parameters": model, "states": max(states), "losses": max(losses), "lost_states": lost}


def train_quietly(sections: dict[str, Any]) -> None:
    """Trains without a word; the table is what is to be read."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(sections)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of a checkpoint, generators left out; without a process group."""
    found = find_checkpoint(path, World(0, 1, 0, 1, torch.device("cpu")))
    metadata = read_metadata(path, found.manifest.files)
    return {name: read_whole(path, metadata, name) for name in metadata.state_dict_metadata if not name.startswith("random.")}


def is_good(case: Case, off: dict[str, float], limit: float = 1e-6) -> bool:
    """Returns whether everything carried over that should."""
    exact = off["parameters"] <= limit and off["states"] <= limit
    return exact and (case.anew or (off["losses"] <= limit and not off["lost_states"]))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.reshard", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = write_histories(folder / "store")
        print(f"{'ranks and tables':66} {'parameters':>11} {'states':>11} {'10 losses':>11}", flush=True)
        for number, case in enumerate(case for case in CASES if args.only in str(case)):
            off = move(case, store, folder / str(number))
            bad += not is_good(case, off)
            anew = f"  {off['lost_states']:.0f} states start anew" if off["lost_states"] else ""
            numbers = " ".join(f"{off[key]:11.2e}" for key in ("parameters", "states", "losses"))
            optimizer = case.keys.get("tables__optimizer", "rowwise_adagrad")
            print(json.dumps({"case": str(case), **off}) if args.json else f"{f'{case} ({optimizer})':66} {numbers}{anew}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
