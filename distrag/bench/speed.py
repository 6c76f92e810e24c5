"""`distrag bench plan-speed`: what planning an epoch takes, in seconds and memory, beside samplers that others use."""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrag.bench.arguments import count, report_file, seed
from distrag.bench.lengths import DRAWN, draw_lengths
from distrag.bench.machine import describe_machine, machine_line
from distrag.bench.table import build_table, open_console
from distrag.bench.walk import Seconds, Task, Walk, grouped_name, walk_grouped, walk_plan, walk_random
from distrag.encoder.sasrec import SASRec, SASRecConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

Report = dict[str, Any]

OTHERS: dict[str, Callable[[Task], Walk]] = {"torch RandomSampler": walk_random, grouped_name(): walk_grouped}


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> Report:
    """Measures what the words ask for, prints the table, writes the JSON file and returns what is in it.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench plan-speed`.
    """
    _add_arguments(parser)
    args = parser.parse_args(words)
    cost = SASRec.cost(SASRecConfig(), args.dim)
    cells: list[Report] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.lengths:
            path = Path(folder) / "lengths"
            draw_lengths(name, max(args.samples), args.seed).tofile(path)
            tasks = [Task(str(path), n, args.world_size, per, cost) for n in sorted(args.samples) for per in args.samples_a_rank]
            cells += list(_measure(name, tasks, args.others_up_to if name == args.lengths[0] else 0))
    report = {"machine": describe_machine(1), "world_size": args.world_size, "cost": cost, "cells": cells}
    _print(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", nargs="+", type=count, default=[10**6, 10**7, 10**8], help="lengths to plan; 1e8 takes 5 minutes")
    parser.add_argument("--lengths", nargs="+", choices=tuple(DRAWN), default=["short", "zipf", "lognormal"], help="how they are drawn")
    parser.add_argument("--world-size", type=count, default=64, help="ranks to plan for")
    parser.add_argument("--samples-a-rank", nargs="+", type=count, default=[256, 32], help="mean samples of a rank in a step")
    parser.add_argument("--dim", type=count, default=256, help="width of the SASRec encoder whose cost is balanced")
    parser.add_argument("--others-up-to", type=count, default=10**7, help="lengths up to which the other samplers run; beyond, ~ scales up")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--json", type=report_file, help="file for everything measured")


def _measure(name: str, tasks: list[Task], others_up_to: int) -> Iterator[Report]:
    """Yields a cell for each task, and for the first batch size of each number of lengths those of the other samplers."""
    for task in tasks:
        yield _cell("distrag", name, task, _run(walk_plan, task, name))
    first = [task for task in tasks if task.samples_a_rank == tasks[0].samples_a_rank]
    measured = [task for task in first if task.num_samples <= others_up_to]
    for sampler, walk in OTHERS.items():
        last: Walk | None = None
        for task in first:
            if task in measured:
                last = _run(walk, task, sampler)
                yield _cell(sampler, name, task, last)
            elif last is not None:
                yield _cell(sampler, name, task, _scale(last, task.num_samples / measured[-1].num_samples), extrapolated=True)


def _run(walk: Callable[[Task], Walk], task: Task, name: str) -> Walk:
    """Returns a walk in a fresh process: what another one has left of memory or compiled code is no help and no burden."""
    print(f"{task.num_samples:,} lengths, {task.samples_a_rank} samples a rank: {name}", file=sys.stderr)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(walk, task).result()


def _scale(walk: Walk, factor: float) -> Walk:
    construct, first_step, epoch, resume = (Seconds(part.cpu * factor, part.wall * factor) for part in walk[:4])
    return Walk(construct, first_step, epoch, resume, round(walk.num_steps * factor), walk.peak_bytes * factor)


def _cell(sampler: str, name: str, task: Task, walk: Walk, *, extrapolated: bool = False) -> Report:
    return {
        "sampler": sampler,
        "lengths": name,
        "num_samples": task.num_samples,
        "samples_a_rank": task.samples_a_rank,
        "num_steps": walk.num_steps,
        "construct_s": walk.construct._asdict(),
        "first_step_s": walk.first_step._asdict(),
        "epoch_ns_a_sequence": {clock: 1e9 * value / task.num_samples for clock, value in walk.epoch._asdict().items()},
        "peak_mb": walk.peak_bytes / 1e6,
        "resume_s": walk.resume._asdict(),
        "resume_from_nothing_s": {clock: value + getattr(walk.construct, clock) for clock, value in walk.resume._asdict().items()},
        "extrapolated": extrapolated,
    }


def _print(report: Report) -> None:
    console = open_console(122)
    console.print(_table(report))
    for line in (
        "CPU seconds of one thread (wall seconds are in the JSON file); distrag: medians over 3 epochs of a fresh process.",
        "first s: first batch, from nothing. ns/seq: construction and every batch of one rank; the others give global batches.",
        "MB: most memory beyond the process with the lengths in it (10^6 bytes). 2/3 s: a resume there, after / with construction.",
        "asked of distrag: epoch <= 150 ns a sequence and <= 32 MB, first step < 1 s, a resume < 0.2 s after construction.",
        "torch RandomSampler: BatchSampler(RandomSampler). LengthGrouped: BatchSampler(LengthGroupedSampler) of transformers.",
        *(f"{name}: {DRAWN[name][0]} tokens" for name in dict.fromkeys(cell["lengths"] for cell in report["cells"])),
        *(
            ["~: scaled up from the largest number of lengths that was measured."]
            if any(c["extrapolated"] for c in report["cells"])
            else []
        ),
        machine_line(report["machine"]),
    ):
        console.print(line, markup=False, highlight=False)


def _table(report: Report) -> Table:
    numbers = ["sequences", "B", "construct s", "first s", "epoch ns/seq", "MB", "2/3 s"]
    table = build_table(f"Planning an epoch, W = {report['world_size']} ranks, B = mean samples a rank", ["sampler", "lengths"], numbers)
    for cell in report["cells"]:
        about = "~" if cell["extrapolated"] else ""
        seconds = [about + _short(cell[key]["cpu"]) for key in ("construct_s", "first_step_s")]
        speed = f"{about}{cell['epoch_ns_a_sequence']['cpu']:,.0f}"
        resume = f"{about}{_short(cell['resume_s']['cpu'])} / {about}{_short(cell['resume_from_nothing_s']['cpu'])}"
        sizes = (f"{cell['num_samples'] / 1e6:,g} M", str(cell["samples_a_rank"]))
        table.add_row(cell["sampler"], cell["lengths"], *sizes, *seconds, speed, f"{about}{cell['peak_mb']:,.0f}", resume)
    return table


def _short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:,.0f}"
