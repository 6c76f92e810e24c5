"""`torchrun ... -m distrag bench ranks`: real ranks that train the same model by the plan and by a plain DistributedSampler, in turn."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distrag.batching.loader import Loader
from distrag.batching.sampler import TokenBudgetSampler
from distrag.bench.arguments import count, report_file
from distrag.bench.machine import describe_machine, machine_line
from distrag.bench.plain import PlainSampler
from distrag.bench.table import build_table, open_console
from distrag.config import RunConfig, read_config
from distrag.data.store import open_store
from distrag.problem import problem
from distrag.training.build import Job, build_job
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.step import train_step
from distrag.training.timing import StepWatch, imbalance
from distrag.world import World, agreed, open_world

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from distrag.batching.compiled import Floats

Report = dict[str, Any]

CHUNK = 8
"""Steps of one side before it is the other's turn."""
SIDES = {"distrag": "distrag's plan", "plain": "DistributedSampler"}


@dataclass(frozen=True)
class RankLap:
    """One epoch of one side, all ranks.

    Attributes:
        own: seconds of each rank's own part of each step, float64 `[W, K]`; see `training.timing`.
        wait: seconds each rank waited for its batch, float64 `[W, K]`.
        cpu: CPU seconds of each rank's training thread in each step, which spends none while it waits, float64 `[W, K]`.
        wall_s: seconds of the lap on the wall, of the slowest rank.
        tokens: history positions of all ranks.
        samples: samples of all ranks.
    """

    own: Floats
    wait: Floats
    cpu: Floats
    wall_s: float
    tokens: int
    samples: int

    def numbers(self) -> Report:
        """Returns the lap in numbers."""
        busy = self.own + self.wait
        waited = float((busy.max(0) - busy).mean(0).sum())
        return {
            "own_imbalance": imbalance(self.own),
            "cpu_imbalance": imbalance(self.cpu),
            "worst_rank_share": waited / self.wall_s,
            "exchange_share": 1.0 - float(busy.mean(0).sum()) / self.wall_s,
            "step_ms": 1e3 * self.wall_s / self.own.shape[1],
            "tokens_per_s": self.tokens / self.wall_s,
            "tokens_per_cpu_s": self.tokens / float(self.cpu.max(0).sum()),
            "num_steps": self.own.shape[1],
            "num_samples": self.samples,
            "num_tokens": self.tokens,
            "wall_s": self.wall_s,
        }


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> Report:
    """Measures on all ranks that torchrun started; rank 0 prints the table and writes the JSON file. Returns what is in it.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench ranks`.

    Raises:
        ValueError: there is one rank only, or a store that cannot be trained on; the same on every rank.
    """
    _add_arguments(parser)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    with open_world(args.device) as world:
        config = agreed(world, lambda: _config(args, world))
        report = _measure(build_job(config, world), args)
        if world.rank == 0:
            _print(report)
        if args.json:
            world.on_first(lambda: Path(args.json).write_text(json.dumps(report, indent=1) + "\n"))
    return report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, help="folder of the store to train on")
    parser.add_argument("--encoder", default="sasrec", help="name of the encoder")
    parser.add_argument("--dim", type=count, default=64, help="width of the model")
    parser.add_argument("--num-layers", type=count, default=2, help="layers of an encoder that has some")
    parser.add_argument("--max-len", type=count, default=2000, help="longest history")
    parser.add_argument("--samples-a-rank", type=count, default=32, help="mean samples of a rank in a step, on both sides")
    parser.add_argument("--rounds", type=count, default=5, help="epochs of each side; the medians count")
    parser.add_argument("--max-steps", type=count, default=10**9, help="steps of a lap; otherwise the whole epoch")
    parser.add_argument("--threads", type=count, default=1, help="threads of torch in each rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=report_file, help="file for everything measured")


def _config(args: argparse.Namespace, world: World) -> RunConfig:
    if world.size == 1:
        todo = "start it with torchrun --nproc-per-node 2 -m distrag bench ranks ..."
        raise problem("A single rank waits for nobody", got="1 rank", wanted="at least 2", where="the launch", todo=todo)
    ids = [feature.name for feature in open_store(args.store).schema.history if feature.kind == "id"]
    encoder = {"name": args.encoder} | ({"num_layers": args.num_layers} if args.encoder not in ("mean", "max", "sum") else {})
    return read_config(
        {
            "task": "next_item",
            "data": {"path": args.store, "max_len": args.max_len, "history": ids[:1], "context": []},
            "batching": {"max_tokens": args.samples_a_rank * args.max_len},
            "model": {"dim": args.dim},
            "encoder": encoder,
            "train": {"device": args.device},
        }
    )


class _Side:
    """One way of sharing an epoch out to the ranks; both train the same model by the same step."""

    def __init__(self, job: Job, sampler: Any) -> None:
        self.job, self.sampler = job, sampler
        self.loader = Loader(job.collate, job.views["train"], sampler, device=job.world.device, prefetch=job.prefetch)
        self._watch = StepWatch(job.parallel.plain.tables, job.world.device)

    def start(self, epoch: int) -> None:
        """Begins an epoch, and a lap."""
        self.sampler.set_epoch(epoch)
        self._batches = iter(self.loader)
        self._times: list[torch.Tensor] = []
        self._cpus: list[float] = []
        self._wall_s, self._tokens, self._samples = 0.0, 0, 0

    def run(self, optimizer: Any, num_steps: int) -> bool:
        """Makes at most so many steps; returns whether there were as many. A collective: all ranks make the same steps."""
        world, waited = self.job.world, self.loader.wait_s
        world.barrier()
        started, done = time.perf_counter(), 0
        while done < num_steps and (batch := next(self._batches, None)) is not None:
            before = time.thread_time()
            self._watch.begin()
            train_step(self.job.parallel, optimizer, batch, world, watch=self._watch)
            self._watch.end(self.loader.wait_s - waited)
            waited = self.loader.wait_s
            self._cpus.append(time.thread_time() - before)
            self._tokens, self._samples = self._tokens + batch.num_tokens_global, self._samples + int((batch.samples >= 0).sum())
            done += 1
        self._times.append(self._watch.take())
        self._wall_s += time.perf_counter() - started
        return done == num_steps

    def finish(self) -> RankLap:
        """Returns the lap as timed by every rank. A collective."""
        self._batches.close()  # type: ignore[attr-defined]  # a generator, whose thread reads ahead
        cpus = torch.tensor(self._cpus, dtype=torch.float64).view(-1, 1)
        times = torch.cat([torch.cat(self._times), cpus], 1)  # [K, 4]: own, exchange, wait, CPU
        ends = torch.tensor([self._wall_s, float(self._samples)], dtype=torch.float64)
        world = self.job.world
        gathered = torch.stack(world.all_gather(times.to(world.device))).cpu().numpy()
        walls = torch.stack(world.all_gather(ends.to(world.device))).cpu()
        own, _, wait, cpu = (gathered[:, :, part] for part in range(4))
        return RankLap(own, wait, cpu, float(walls[:, 0].max()), self._tokens, int(walls[:, 1].sum()))

    def close(self) -> None:
        """Takes the watch off the model."""
        self._watch.close()

    def planned_imbalance(self, max_steps: int) -> float:
        """Returns max/mean of the cost of ranks, mean over the steps."""
        plan, cost = self.sampler.plan, self.job.cost
        steps = range(min(plan.num_steps, max_steps))
        costs = [plan.rank_costs(step, cost) if isinstance(self.sampler, PlainSampler) else plan.rank_costs(step) for step in steps]
        return float(np.mean([cost.max() / cost.mean() for cost in costs]))


def _build_sides(job: Job, samples_a_rank: int) -> dict[str, _Side]:
    world, view = job.world, job.views["train"]
    lengths = view.lengths
    budget = max(int(samples_a_rank * lengths.mean()), int(lengths.max()))
    planned = TokenBudgetSampler(view, max_tokens=budget, cost=job.cost, num_replicas=world.size, rank=world.rank)
    # As many samples a step on the mean, so that both sides make about as many steps.
    size = -(-len(view) // (world.size * planned.plan.num_steps))
    plain = PlainSampler(lengths, world_size=world.size, rank=world.rank, batch_size=size)
    return {"distrag": _Side(job, planned), "plain": _Side(job, plain)}


def _measure(job: Job, args: argparse.Namespace) -> Report:
    sides = agreed(job.world, lambda: _build_sides(job, args.samples_a_rank))
    optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
    Schedule(optimizer, job.config.optim, 10**9).set(0)
    job.parallel.model.train()
    laps: dict[str, list[RankLap]] = {name: [] for name in sides}
    planned: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, args.rounds):  # the first round warms up: what is compiled or allocated at first use
        for name, lap in _run_round(sides, optimizer, turn + 1, args.max_steps if turn >= 0 else min(CHUNK, args.max_steps)).items():
            if turn >= 0:
                laps[name].append(lap)
                planned[name].append(sides[name].planned_imbalance(args.max_steps))
    for side in sides.values():
        side.close()
    lengths = job.views["train"].lengths
    return {
        "machine": describe_machine(args.threads),
        "world_size": job.world.size,
        "device": job.world.device.type,
        "encoder": args.encoder,
        "dim": args.dim,
        "num_layers": args.num_layers,
        "store": Path(args.store).name,
        "num_samples": len(lengths),
        "length_p50_p95_max": np.quantile(lengths, [0.5, 0.95, 1.0]).tolist(),
        "sides": {name: {**_medians(laps[name]), "planned_imbalance": median(planned[name])} for name in sides},
        "laps": {name: [lap.numbers() for lap in laps[name]] for name in sides},
    }


def _medians(laps: list[RankLap]) -> Report:
    numbers = [lap.numbers() for lap in laps]
    return {key: median(its[key] for its in numbers) for key in numbers[0]}


def _run_round(sides: dict[str, _Side], optimizer: Any, epoch: int, max_steps: int) -> dict[str, RankLap]:
    """Returns an epoch of each side, a few steps in turn, so that whatever else the machine does slows both."""
    for side in sides.values():
        side.start(epoch)
    going, done = list(sides), 0
    while going and done < max_steps:
        steps = min(CHUNK, max_steps - done)
        going = [name for name in going[::-1] if sides[name].run(optimizer, steps)]
        done += steps
    return {name: side.finish() for name, side in sides.items()}


def _print(report: Report) -> None:
    console = open_console(132)
    title = f"{report['world_size']} ranks on {report['device']}: {report['encoder']} on {report['store']}, slowest rank over the mean"
    numbers = ["planned", "own", "CPU", "waited %", "exchange %", "step ms", "tokens/s", "tokens/CPU s", "samples", "steps"]
    table = build_table(title, ["dealt by"], numbers)
    for name, side in report["sides"].items():
        ratios = [f"{side[key]:.3f}" for key in ("planned_imbalance", "own_imbalance", "cpu_imbalance")]
        shares = [f"{side[key]:.1%}" for key in ("worst_rank_share", "exchange_share")]
        counts = [f"{side[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_cpu_s", "num_samples", "num_steps")]
        table.add_row(SIDES[name], *ratios, *shares, f"{side['step_ms']:.1f}", *counts)
    console.print(table)
    median_length, _, longest = report["length_p50_p95_max"]
    rounds = len(report["laps"]["distrag"])
    sizes = f"median {median_length:,.0f}, longest {longest:,.0f} tokens; D = {report['dim']}, {report['num_layers']} layers"
    for line in (
        f"{report['num_samples']:,} histories, {sizes}; medians over {rounds} epochs of each side, {CHUNK} steps in turn.",
        "Both sides train the same model by the same loader and step. planned: of the encoder's cost a L + b L^2, mean over the steps.",
        "own: each rank's own seconds (encoder, head and loss, there and back, optimizer): sum over steps of the largest over the mean.",
        "CPU: the same of the CPU seconds of the training thread in the whole step; it spends none while it waits. tokens/CPU s: of all",
        "ranks, a CPU second of the slowest rank of each step: what a machine that does nothing else would come to.",
        "waited: share of the wall time that ranks are idle because another is slower. exchange: all that is not own, waiting included.",
        machine_line(report["machine"]),
    ):
        console.print(line, markup=False, highlight=False)
