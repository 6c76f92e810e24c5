"""`distrag bench saving`: how long a save holds up training, in its way and beside it, in turn; on one rank or under torchrun on many."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distrag.bench.arguments import count
from distrag.bench.histories import draw_histories
from distrag.bench.machine import describe_machine, machine_line
from distrag.bench.ragged import RaggedSide, bench_config, write_histories
from distrag.bench.shape import ModelShape
from distrag.bench.table import build_table, open_console
from distrag.checkpoint import Checkpoints
from distrag.world import World, open_world

if TYPE_CHECKING:
    import argparse

SIDES = {"in the way": False, "beside": True}


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Measures what the words ask for, prints the table, writes the JSON file and returns what is in it. A collective.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench saving`.
    """
    parser.add_argument("--rows", type=count, default=1_000_000, help="rows of the item table")
    parser.add_argument("--dim", type=count, default=64, help="width of a row")
    parser.add_argument("--encoder", choices=("mean", "gru", "self_attention"), default="gru")
    parser.add_argument("--batch-size", type=count, default=256, help="samples of a rank in a step")
    parser.add_argument("--rounds", type=count, default=7, help="saves of each kind; the medians count")
    parser.add_argument("--steps", type=count, default=40, help="steps after each save; more than its writing takes")
    parser.add_argument("--folder", help="where to save, on the disk to be measured; otherwise a temporary folder")
    parser.add_argument("--json", help="file for everything measured")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    with open_world("cpu") as world, tempfile.TemporaryDirectory() as own:
        store = Path(own) / "store"
        write_histories(draw_histories(20_000, args.rows - 1), store)
        folder = Path(world.broadcast_object(args.folder or own)) / "checkpoints"
        side = RaggedSide(bench_config(store, args.encoder, args.batch_size, ModelShape(dim=args.dim)), world)
        report = {"machine": describe_machine(1), "world_size": world.size, **_measure(side, folder, args)}
        if world.rank == 0:
            _print(report)
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _measure(side: RaggedSide, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    world = side.world
    savers = {name: Checkpoints(folder / f"side-{name[0]}", world, keep=2, background=beside) for name, beside in SIDES.items()}
    laps: dict[str, list[dict[str, float]]] = {name: [] for name in ("none", *SIDES)}
    for turn in range(args.rounds + 1):
        for name in list(laps)[:: 1 if turn % 2 else -1]:
            lap = _lap(side, savers.get(name), turn, args.steps)
            if turn:  # the first is thrown away: it compiles, and takes its memory
                laps[name].append(_slowest(lap, world))
    size = sum(file.stat().st_size for file in next((folder / "side-b").glob("step-*")).iterdir())
    medians = {name: {key: statistics.median(lap[key] for lap in its) for key in its[0]} for name, its in laps.items()}
    plain = medians["none"]["train_s"]
    for of in medians.values():
        of["lost_s"] = of["held_s"] + of["train_s"] - plain
    return {"bytes": size, "steps": args.steps, "medians": medians, "laps": laps}


def _lap(side: RaggedSide, saver: Checkpoints | None, turn: int, steps: int) -> dict[str, float]:
    """Saves, and trains so many steps; returns the seconds of each, and until the save was whole."""
    side.world.barrier()
    began = time.perf_counter()
    if saver is not None:
        saver.save(f"step-{turn + 1}", side.job.parallel, side.optimizer, {"phase": "train", "step": turn + 1})
    held = time.perf_counter()
    for _ in range(steps):
        side.step()
    trained = time.perf_counter()
    if saver is not None:
        saver.wait()
    return {"held_s": held - began, "train_s": trained - held, "wait_s": time.perf_counter() - trained}


def _slowest(lap: dict[str, float], world: World) -> dict[str, float]:
    slowest = world.all_reduce_max(torch.tensor(list(lap.values()), dtype=torch.float64))
    return dict(zip(lap, slowest.tolist(), strict=True))


def _print(report: dict[str, Any]) -> None:
    console, medians = open_console(), report["medians"]
    title = f"A save of {report['bytes'] / 2**20:,.0f} MiB, {report['world_size']} rank(s), then {report['steps']} steps: milliseconds"
    table = build_table(title, ["the save is written"], ("holds up", "a step then", "waited after them", "lost in all"))
    for name, its in medians.items():
        step = its["train_s"] / report["steps"]
        table.add_row(name, *(f"{1e3 * value:,.1f}" for value in (its["held_s"], step, its["wait_s"], its["lost_s"])))
    console.print(table)
    held, lost = (medians["in the way"][key] / max(medians["beside"][key], 1e-9) for key in ("held_s", "lost_s"))
    console.print(f"beside: holds up {held:.1f}x shorter, costs {1 / max(lost, 1e-9):.2f}x as much in all", markup=False)
    console.print(machine_line(report["machine"]))
