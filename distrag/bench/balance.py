"""`distrag bench plan-balance`: how even the planned steps are, beside a random deal and balancing after loading. No model runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distrag.batching.plan import plan_epoch
from distrag.bench.arguments import count, report_file, seed
from distrag.bench.dealing import deal_equal_counts, random_batches
from distrag.bench.lengths import DRAWN, draw_lengths, read_lengths
from distrag.bench.machine import describe_machine, machine_line
from distrag.bench.table import build_table, open_console
from distrag.encoder.sasrec import SASRec, SASRecConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table

    from distrag.batching.compiled import Floats, Ints
    from distrag.batching.plan import Cost

Report = dict[str, Any]

ASKED = {256: (1.002, 1.005), 32: (1.01, float("inf"))}
"""Largest mean and 99th percentile of max/mean that distrag asks of itself, by samples a rank."""
DEALINGS = ("max_tokens", "global_tokens", "karmarkar_karp", "random")


@dataclass(frozen=True)
class Balance:
    """How even some steps are.

    Attributes:
        cost: dearest rank over the mean of all, float64 `[K]`.
        tokens: fullest rank over the mean of all, float64 `[K]`.
        single: whether one sample alone costs more than the mean rank, so that nothing can even that step out, bool `[K]`.
        most_tokens: tokens of the fullest rank of any of these steps.
        step_tokens: tokens of a step over all ranks, mean.
    """

    cost: Floats
    tokens: Floats
    single: Ints
    most_tokens: int
    step_tokens: float


def measure(steps: Iterable[tuple[Ints, Ints]], lengths: Ints, cost: Cost, world_size: int) -> Balance:
    """Returns how even steps are.

    Args:
        steps: of each step its sample numbers and their ranks.
        lengths: tokens of each sample, `[N]`.
        cost: `(a, b, c)`; a sample of length L costs `a*L + b*L^2 + c`.
        world_size: ranks (`W`).
    """
    a, b, c = cost
    rows = []
    for samples, ranks in steps:
        own = lengths[samples].astype(np.float64)
        price = a * own + b * own * own + c
        tokens, costs = (np.bincount(ranks, weights=values, minlength=world_size) for values in (own, price))
        rows.append((costs.max() / costs.mean(), tokens.max() / tokens.mean(), price.max() > costs.mean(), tokens.max(), own.sum()))
    even = np.array(rows, np.float64).reshape(-1, 5)
    most, mean = (int(even[:, 3].max()), float(even[:, 4].mean())) if len(even) else (0, 0.0)
    return Balance(even[:, 0], even[:, 1], even[:, 2] > 0, most, mean)


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> Report:
    """Measures what the words ask for, prints the tables, writes the JSON file and returns what is in it.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench plan-balance`.
    """
    _add_arguments(parser)
    args = parser.parse_args(words)
    cost = SASRec.cost(SASRecConfig(), args.dim)
    stores = {Path(path).name: read_lengths(path) for path in args.store}
    known = {name: draw_lengths(name, args.samples, args.seed) for name in args.lengths} | stores
    cells = [
        cell
        for name, lengths in known.items()
        for world_size in args.world_sizes
        for per_rank in args.samples_a_rank
        for cell in _measure_world(name, lengths, world_size, per_rank, cost, args)
    ]
    report = {"machine": describe_machine(1), "cost": cost, "lengths": _describe(known), "cells": cells}
    _print(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="*", choices=tuple(DRAWN), default=["zipf", "lognormal"], help="lengths that are drawn")
    parser.add_argument("--samples", type=count, default=6_000_000, help="drawn lengths of each kind")
    parser.add_argument("--store", nargs="+", default=[], help="stores whose lengths are taken as well")
    parser.add_argument("--world-sizes", nargs="+", type=count, default=[2, 8, 16, 64, 1024], help="ranks to plan for")
    parser.add_argument("--samples-a-rank", nargs="+", type=count, default=[256, 32], help="mean samples of a rank in a step")
    parser.add_argument("--max-steps", type=count, default=400, help="steps to look at, spread over the epoch")
    parser.add_argument("--dim", type=count, default=256, help="width of the SASRec encoder whose cost is balanced")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--json", type=report_file, help="file for everything measured")


def _describe(known: dict[str, Ints]) -> Report:
    return {
        name: {
            "what": DRAWN[name][0] if name in DRAWN else "a store",
            "num_samples": len(lengths),
            "mean": float(lengths.mean()),
            "p50_p95_max": np.quantile(lengths, [0.5, 0.95, 1.0]).tolist(),
        }
        for name, lengths in known.items()
    }


def _measure_world(name: str, lengths: Ints, world_size: int, per_rank: int, cost: Cost, args: argparse.Namespace) -> Iterator[Report]:
    """Yields one cell a dealing; the plan's alone where the lengths do not fill a single step."""
    enough = len(lengths) >= world_size * per_rank
    max_tokens = max(int(per_rank * lengths.mean()), int(lengths.max()))
    for dealing in DEALINGS if enough else DEALINGS[:2]:
        print(f"{name}, W = {world_size:,}, {per_rank} samples a rank: {dealing}", file=sys.stderr)
        if dealing in ("max_tokens", "global_tokens"):
            budget = {dealing: max_tokens * (world_size if dealing == "global_tokens" else 1)}
            plan = plan_epoch(lengths, world_size=world_size, cost=cost, seed=args.seed, **budget)  # type: ignore[arg-type]
            num_steps = plan.num_steps
            at = np.unique(np.linspace(0, num_steps - 1, min(num_steps, args.max_steps)).astype(np.int64)).tolist()
            steps: Iterable[tuple[Ints, Ints]] = ((plan.step_samples(step), plan.step_ranks(step)) for step in at)
        else:
            num_steps = len(lengths) // (world_size * per_rank)
            steps = _equal_counts(lengths, world_size, per_rank, cost, args, balanced=dealing == "karmarkar_karp")
        balance = measure(steps, lengths, cost, world_size)
        cell = {"lengths": name, "world_size": world_size, "samples_a_rank": per_rank, "dealing": dealing, "num_steps": num_steps}
        cell["fills_a_step"] = enough
        yield {**cell, **_numbers(balance), "max_tokens": max_tokens, "filled": balance.step_tokens / (max_tokens * world_size)}


def _equal_counts(
    lengths: Ints, world_size: int, per_rank: int, cost: Cost, args: argparse.Namespace, *, balanced: bool
) -> Iterator[tuple[Ints, Ints]]:
    a, b, c = cost
    as_they_come = np.arange(world_size * per_rank) % world_size
    for step, samples in enumerate(random_batches(len(lengths), world_size, per_rank, args.seed)):
        if step == args.max_steps:
            return
        own = lengths[samples].astype(np.float64)
        yield samples, deal_equal_counts(a * own + b * own * own + c, world_size) if balanced else as_they_come


def _numbers(balance: Balance) -> Report:
    within = ~balance.single
    return {
        "steps_looked_at": len(balance.cost),
        "single_sample_share": float(balance.single.mean()),
        "cost": _peaks(balance.cost),
        "tokens": _peaks(balance.tokens),
        "cost_without_single": _peaks(balance.cost[within]),
        "tokens_without_single": _peaks(balance.tokens[within]),
        "fullest_rank_tokens": balance.most_tokens,
    }


def _peaks(values: Floats) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"mean": float(values.mean()), "p99": float(np.quantile(values, 0.99)), "max": float(values.max())}


def verdict(cell: Report, what: str) -> str:
    """Returns whether a cell keeps what is asked, in the steps that no single sample makes uneven: `yes`, `no`, or `-` if nothing is asked.

    Args:
        cell: of the report.
        what: `cost`, or `tokens`, whose cap counts too.
    """
    asked, peaks = ASKED.get(cell["samples_a_rank"]), cell[f"{what}_without_single"]
    if asked is None or peaks is None or not cell["fills_a_step"]:
        return "-"
    over = what == "tokens" and cell["dealing"] == "max_tokens" and cell["fullest_rank_tokens"] > cell["max_tokens"]
    return "yes" if peaks["mean"] <= asked[0] and peaks["p99"] <= asked[1] and not over else "no"


def _print(report: Report) -> None:
    console = open_console(132)
    for what, title in (("cost", "Cost: dearest rank over the mean rank"), ("tokens", "Tokens: fullest rank over the mean rank")):
        console.print(_table(report["cells"], what, f"{title}; mean and 99th percentile over the steps of an epoch (ratios, no unit)"))
    a, b, c = report["cost"]
    for name, facts in report["lengths"].items():
        median, _, most = facts["p50_p95_max"]
        sizes = f"{facts['num_samples']:,} samples; mean {facts['mean']:,.0f}, median {median:,.0f}, longest {most:,.0f} tokens"
        console.print(f"{name}: {facts['what']}; {sizes}", markup=False, highlight=False)
    for line in (
        f"W: ranks. B: samples a rank, mean. Cost of a sample of L tokens: {a:g} L + {b:.3g} L^2 + {c:g}.",
        "distrag: max_tokens = B x mean length, a rank; global: global_tokens = W x as many, a step. steps: distrag's.",
        "random: DistributedSampler. K-K: its global batches dealt again in equal counts by Karmarkar-Karp differencing of cost.",
        "-: fewer samples than W x B, so that the plan makes one smaller step and there is no whole batch to compare with.",
        "one: share of distrag's steps in which one sample costs more than the mean rank; no dealing can even those out.",
        "asked: mean <= 1.002 and p99 <= 1.005 for B = 256, mean <= 1.01 for B = 32, in the other steps; of distrag, of global.",
        "cap: tokens of the fullest rank of distrag's steps, as a share of max_tokens.",
        machine_line(report["machine"]),
    ):
        console.print(line, markup=False, highlight=False)


def _table(cells: list[Report], what: str, title: str) -> Table:
    numbers = ["W", "B", "steps", "one", "distrag", "global", "K-K", "random", "asked"]
    table = build_table(title, ["lengths"], numbers + (["cap"] if what == "tokens" else []))
    worlds: dict[tuple[str, int, int], dict[str, Report]] = {}
    for cell in cells:
        worlds.setdefault((cell["lengths"], cell["world_size"], cell["samples_a_rank"]), {})[cell["dealing"]] = cell
    for (name, world_size, per_rank), its in worlds.items():
        ours = its["max_tokens"]
        peaks = ["{mean:.4f} {p99:.4f}".format(**its[dealing][what]) if dealing in its else "-" for dealing in DEALINGS]
        asked = ", ".join(verdict(its[dealing], what) for dealing in ("max_tokens", "global_tokens"))
        row = [name, f"{world_size:,}", str(per_rank), f"{ours['num_steps']:,}", f"{ours['single_sample_share']:.0%}", *peaks, asked]
        table.add_row(*row, *([f"{ours['fullest_rank_tokens'] / ours['max_tokens']:.3f}"] if what == "tokens" else []))
    return table
