"""BATCHES -> A MODEL: a config trained, selected on valid, tested once, with everything it did in the run directory."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import yaml

from distrag.checkpoint import load_checkpoint
from distrag.config import RunConfig, read_config, to_dict
from distrag.problem import problem
from distrag.training.build import Job, build_job
from distrag.training.checks import check_run_dir
from distrag.training.contract import write_contract
from distrag.training.fit import Fit, build_sampler, count_steps
from distrag.training.held_out import Metrics, evaluate_view
from distrag.training.metrics import MetricsWriter, finite
from distrag.world import open_world


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        run_dir: folder with everything the run wrote.
        num_steps: global steps trained until valid had chosen.
        num_epochs: epochs begun.
        best_step: step of the best checkpoint.
        refit_steps: steps of the last fit on train and valid together; 0 without `train.refit`.
        valid: metrics of the valid view at the best step.
        test: metrics of the test view.
        seconds: wall time of training and evaluation.
        losses: loss of each logged step, in order.
    """

    run_dir: Path
    num_steps: int
    num_epochs: int
    best_step: int
    refit_steps: int
    valid: Metrics
    test: Metrics
    seconds: float
    losses: list[float] = field(default_factory=list)


def train(config: RunConfig | Mapping[str, Any] | Sequence[str]) -> RunResult:
    """Trains the config on all ranks that torchrun started, or alone, and returns the result.

    Args:
        config: a RunConfig, a nested mapping as in YAML, or command-line words.

    Raises:
        ValueError: anything a config, a store or a file can cause, before any rank waits for another.
    """
    run = read_config(config)
    with open_world(run.train.device, timeout_s=run.train.timeout_s) as world:
        return run_job(build_job(run, world))


def run_job(job: Job) -> RunResult:
    """Trains a job, refits it where asked, tests it once and writes the result. A collective: every rank calls it."""
    started, folder = time.perf_counter(), Path(job.config.train.run_dir)
    sampler = build_sampler(job)
    num_steps = count_steps(job, sampler)
    _check_targets(job)
    note, held = job.world.on_first(lambda: _open(job, folder)) or ("", None)
    tensorboard = job.config.train.tensorboard
    writer = job.world.on_first(lambda: MetricsWriter(folder, active=True, tensorboard=tensorboard, num_steps=num_steps))
    writer = writer or MetricsWriter(folder, active=False, tensorboard=False, num_steps=num_steps)
    try:
        fit = Fit(job, sampler, writer, folder / "checkpoints" / "best")
        _describe(fit, note)
        fit.run()
        last = _refit(fit, folder) if job.config.train.refit else fit
        if last is fit:
            load_checkpoint(fit.checkpoint, job.parallel)
        test = evaluate_view(last.job, "test")
        writer.write("test", last.step, test)
        writer.say(f"test, from the best step {fit.best_step}: {_show(test)}")
        if test.get("num_seen_targets"):
            writer.say(
                f"{test['num_seen_targets']:,} test targets are items the user had before; those are no candidates, so they count as misses"
            )
    finally:
        writer.close()
        if held is not None:
            held.close()
    refit_steps = last.step if last is not fit else 0
    seconds = time.perf_counter() - started
    result = RunResult(folder, fit.step, fit.epoch, fit.best_step, refit_steps, fit.best_valid, test, seconds, fit.losses)
    job.world.on_first(lambda: (folder / "result.json").write_text(json.dumps(_summary(job, result), indent=1) + "\n"))
    return result


def _refit(fit: Fit, folder: Path) -> Fit:
    """Returns a fresh fit on train and valid together, for as many epochs as the best step took, under the same schedule."""
    job = build_job(fit.config, fit.world, fold_valid=True)
    sampler = build_sampler(job)
    longer = len(sampler) / len(fit.sampler)
    steps = max(1, round(fit.best_step * longer))
    again = Fit(
        job,
        sampler,
        fit.writer,
        folder / "checkpoints" / "refit",
        num_steps=steps,
        schedule_steps=round(fit.num_steps * longer),
        selects=False,
    )
    fit.writer.say(f"refit on train and valid together: {steps} steps")
    again.run()
    return again


def _check_targets(job: Job) -> None:
    counts = job.collate.counts(job.views["train"])
    if counts.sum() > 0:
        return
    what = "known items that follow another" if job.config.task == "next_item" else "samples of a weight above 0"
    todo = "give longer histories or weights, or change data.split: leave_one_out takes the last two events of each row away"
    raise problem(
        "There is nothing to learn", got=f"0 targets in {len(counts):,} train samples", wanted=what, where=job.store.path, todo=todo
    )


def _open(job: Job, folder: Path) -> tuple[str, TextIO]:
    """Writes config and schema; an earlier run in that folder is moved aside, and the note says where.

    Returns:
        The note, and the open lock that tells other runs that this one lives.
    """
    check_run_dir(folder)
    _check_free(folder)
    note = ""
    if (folder / "metrics.jsonl").exists():
        number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
        note = f"an earlier run was moved to {folder}.{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(job.config), sort_keys=False))
    write_contract(job.store, folder)
    held = (folder / _LOCK).open("w")
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return note, held


_LOCK = "run.lock"


def _check_free(folder: Path) -> None:
    """Refuses the folder of a run that still lives; the kernel lets go of a dead run's lock."""
    if not (folder / _LOCK).exists():
        return
    with (folder / _LOCK).open("r+") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            todo = "wait for it, or set another --train.run_dir"
            raise problem(
                "Another run is at work in this folder", got="its lock is held", wanted="a free folder", where=folder, todo=todo
            ) from None


def _describe(fit: Fit, note: str) -> None:
    job, plan, say = fit.job, fit.sampler.plan, fit.writer.say
    if note:
        say(note)
    sizes = ", ".join(f"{name} {len(view):,}" for name, view in job.views.items())
    say(f"{job.world.size} rank(s) on {job.world.device.type}; samples: {sizes}; cut to max_len: {job.views['train'].num_cut:,} events")
    say(f"{plan.num_steps} steps an epoch, {fit.num_steps} in all; planned imbalance {plan.imbalances(64).mean():.4f} (max/mean cost)")
    if not len(job.views["valid"]):
        say("valid has no samples: nothing selects the best step, and the last one is tested")
    for placement in job.placements:
        say(f"table {placement}")
    rooms = {name: module for name, module in job.parallel.plain.named_children() if name != "tables"}
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in rooms.items()}
    say("dense parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items() if count))


def _show(metrics: Metrics) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in metrics.items() if isinstance(value, float))


def _summary(job: Job, result: RunResult) -> dict[str, Any]:
    plain = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    packages = {name: version(name) for name in ("torch", "torchrec", "fbgemm-gpu", "numpy", "pyarrow")}
    return {
        **{key: {k: finite(v) for k, v in value.items()} if isinstance(value, dict) else value for key, value in plain.items()},
        "num_samples": {name: len(view) for name, view in job.views.items()},
        "num_cut": {name: view.num_cut for name, view in job.views.items()},
        "store_hash": job.store.content_hash,
        "world_size": job.world.size,
        "device": job.world.device.type,
        "versions": {"python": platform.python_version(), **packages},
    }
