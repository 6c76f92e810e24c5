"""`distrag bench safety`: what the checks of a training step cost, the same steps with and without them in turn, on one rank or many."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distrag.bench.arguments import count
from distrag.bench.histories import draw_histories
from distrag.bench.machine import describe_machine, machine_line
from distrag.bench.ragged import RaggedSide, bench_config, write_histories
from distrag.bench.shape import ModelShape
from distrag.bench.table import build_table, open_console
from distrag.bench.timing import Lap, compare, step_s
from distrag.training.metrics import MetricsWriter
from distrag.training.step import train_step
from distrag.training.stepper import Stepper
from distrag.world import World, open_world

if TYPE_CHECKING:
    import argparse

ENCODERS = ("mean", "gru", "self_attention")
LOG_EVERY = 50


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Measures what the words ask for, prints the table, writes the JSON file and returns what is in it. A collective.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench safety`.
    """
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=[32, 256], help="samples of a rank in a step")
    parser.add_argument("--rounds", type=count, default=9, help="laps of each side; the medians count")
    parser.add_argument("--steps", type=count, default=40, help="steps of a lap")
    parser.add_argument("--samples", type=count, default=100_000, help="drawn histories")
    parser.add_argument("--json", help="file for everything measured")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    with open_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"  # each rank its own: a folder of this machine's that nobody else knows
        write_histories(draw_histories(args.samples, 50_000, ModelShape().max_len), store)
        cells = [_measure(store, encoder, size, args, world) for encoder in args.encoders for size in args.batch_sizes]
        report = {"machine": describe_machine(1), "world_size": world.size, "cells": cells}
        if world.rank == 0:
            _print(report)
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


class _Side:
    """Trains one job, with the checks or without.

    Args:
        ragged: job, optimizer and batches.
        checked: whether steps are guarded and watched, as training does.
        folder: where a skipped step would be written.
    """

    def __init__(self, ragged: RaggedSide, folder: Path, *, checked: bool) -> None:
        self.ragged = ragged
        writer = MetricsWriter(folder, active=False, tensorboard=False)
        self._stepper = Stepper(ragged.job, ragged.optimizer, ragged.schedule, writer, folder) if checked else None

    def lap(self, num_steps: int) -> Lap:
        """Makes so many steps. A collective."""
        batches = [next(self.ragged.batches) for _ in range(num_steps)]
        world = self.ragged.world
        world.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in batches:
            self._step(batch)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        cpus = world.all_gather(torch.tensor([cpu], dtype=torch.float64))
        return Lap(num_steps, sum(batch.num_tokens for batch in batches), float(torch.stack(cpus).sum()), wall)

    def _step(self, batch: Any) -> None:
        ragged = self.ragged
        ragged.num_steps += 1
        if self._stepper is None:
            ragged.schedule.set(ragged.num_steps)
            train_step(ragged.job.parallel, ragged.optimizer, batch, ragged.world)
        else:
            logs = ragged.num_steps % LOG_EVERY == 0
            self._stepper.run(batch, ragged.num_steps, logs=logs, longest=0, waited_s=_no_wait)


def _no_wait() -> float:
    return 0.0


def _measure(store: Path, encoder: str, batch_size: int, args: argparse.Namespace, world: World) -> dict[str, Any]:
    config = bench_config(store, encoder, batch_size, ModelShape())
    sides = {name: _Side(RaggedSide(config, world), store.parent, checked=name == "checked") for name in ("checked", "unchecked")}
    laps: dict[str, list[Lap]] = {name: [] for name in sides}
    for turn in range(args.rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            lap = sides[name].lap(args.steps)
            if turn:  # the first is thrown away: it compiles
                laps[name].append(lap)
    ratio = compare(laps["unchecked"], laps["checked"])
    return {
        "encoder": encoder,
        "batch_size": batch_size,
        "step_ms": {name: 1e3 * step_s(its) for name, its in laps.items()},
        "ratio": asdict(ratio),
        "laps": {name: [asdict(lap) for lap in its] for name, its in laps.items()},
    }


def _print(report: dict[str, Any]) -> None:
    console = open_console()
    title = f"A step with and without its checks, {report['world_size']} rank(s): CPU ms of all ranks"
    table = build_table(title, ["encoder"], ("B", "checked", "unchecked", "cost", "middle half", "on the wall"))
    for cell in report["cells"]:
        times = (f"{cell['step_ms'][name]:.2f}" for name in ("checked", "unchecked"))
        ratio = cell["ratio"]
        shares = (f"{ratio['value'] - 1:+.1%}", f"{ratio['low'] - 1:+.1%} .. {ratio['high'] - 1:+.1%}", f"{ratio['wall'] - 1:+.1%}")
        table.add_row(cell["encoder"], str(cell["batch_size"]), *times, *shares)
    console.print(table)
    console.print(machine_line(report["machine"]))
