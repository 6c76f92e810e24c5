"""BATCHES -> A MODEL: a config trained, selected on valid, tested once, with everything it did in the run directory."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from distrag.checkpoint import load_checkpoint, write_whole
from distrag.config import RunConfig, read_config, to_dict
from distrag.data.text_file import dump_yaml
from distrag.problem import problem
from distrag.training.build import Job, build_job, build_sampler, count_steps
from distrag.training.checks import check_run_dir
from distrag.training.contract import write_contract
from distrag.training.cost import keep_cost
from distrag.training.fit import Fit
from distrag.training.held_out import Metrics, evaluate_view
from distrag.training.init import start_from
from distrag.training.interrupt import Interrupt
from distrag.training.metrics import MetricsWriter, SampleLog, finite
from distrag.training.resume import build_checkpoints, drop_beyond, is_finished, read_losses
from distrag.training.start import Start, find_start
from distrag.world import World, agreed, open_world


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

    A run that is asked to stop, by SIGTERM or Ctrl-C, saves its step first. Started again by the same torchrun or Slurm job, it goes on
    from its last checkpoint without being told to.

    Raises:
        ValueError: anything a config, a store or a file can cause, before any rank waits for another.
        RanksFailed: another rank failed or died.
        Stopped: the run was asked to stop; a SystemExit of code 75, or 130 for Ctrl-C.
    """
    run = read_config(config)
    with Interrupt() as interrupt, open_world(run.train.device, timeout_s=run.train.timeout_s) as world:
        interrupt.listen(world)
        return run_job(build_job(run, world), interrupt)


def run_job(job: Job, interrupt: Interrupt | None = None) -> RunResult:
    """Trains a job, refits it where asked, tests it once and writes the result; with `train.resume`, from where its run was cut.

    A collective: every rank calls it.

    Args:
        job: from `build_job`.
        interrupt: tells whether the run was asked to stop; None is never asked.
    """
    started, folder, world = time.perf_counter(), Path(job.config.train.run_dir), job.world
    again = bool(world.broadcast_object(world.on_first(lambda: _is_second_start(folder, world))))
    resumes = again or job.config.train.resume
    if resumes:
        world.on_first(lambda: check_free(folder))
    start = find_start(job, folder, resumes=resumes)
    state = start.state
    if state is not None and is_finished(state, job.config):
        world.on_first(lambda: print(f"{folder}: this run is finished; its result stays", flush=True))
        return RunResult(**{f.name: state["result"][f.name] for f in dataclasses.fields(RunResult)} | {"run_dir": folder})
    before_s = state["seconds"] if state else 0.0
    sampler = build_sampler(job)
    count_steps(job, sampler)
    _check_targets(job)
    if start.init is not None and state is None:
        start.notes.append(start_from(job, start.init))
    notes, held = world.on_first(lambda: _open(job, folder, state, again=again)) or ([], None)
    start.notes.extend(notes)
    world.peers.errors, world.peers.todo, world.peers.where = folder / "errors", _TODO, "the start"
    log = _open_log(job, folder)
    if interrupt is not None:
        interrupt.patient = True
    try:
        checkpoints = build_checkpoints(job.config, folder, world)
        options: dict[str, Any] = {"samples": log.samples, "interrupt": interrupt, "checkpoints": checkpoints}
        fit = Fit(job, sampler, log.writer, folder, seconds=_clock(started - before_s), **options)
        result = _finish(fit, _train(fit, folder, start), folder)
        world.on_first(lambda: write_whole(folder / "result.json", json.dumps(_summary(job, result), indent=1) + "\n"))
    finally:
        log.close()
        if held is not None:
            held.close()
    return result


def _clock(started: float) -> Callable[[], float]:
    return lambda: time.perf_counter() - started


def _finish(fit: Fit, last: Fit, folder: Path) -> RunResult:
    """Tests the state that valid chose, or that was refitted, and returns what the run came to."""
    if last is fit:
        load_checkpoint(fit.checkpoints.folder / fit.kept, fit.job.parallel, None, fit.world)
    last.job.world.peers.where = "the test"
    test = evaluate_view(last.job, "test", lambda: last.pause(saves=False))
    fit.writer.write("test", last.step, test)
    fit.writer.say(f"test, from the best step {fit.best_step}: {_show(test)}")
    if test.get("num_seen_targets"):
        fit.writer.say(
            f"{test['num_seen_targets']:,} test targets are items the user had before; those are no candidates, so they count as misses"
        )
    refit_steps = last.step if last is not fit else 0
    return RunResult(folder, fit.step, fit.num_epochs, fit.best_step, refit_steps, fit.best_valid, test, fit.seconds(), fit.losses)


@dataclass(frozen=True)
class _Log:
    """What a rank writes while it trains."""

    writer: MetricsWriter
    samples: SampleLog | None

    def close(self) -> None:
        self.writer.close()
        if self.samples is not None:
            self.samples.close()


def _open_log(job: Job, folder: Path) -> _Log:
    train, first = job.config.train, job.world.rank == 0

    def build() -> _Log:
        samples = SampleLog(folder, job.world.rank) if train.log_samples else None
        return _Log(MetricsWriter(folder, active=first, tensorboard=train.tensorboard), samples)

    return agreed(job.world, build)


def _train(fit: Fit, folder: Path, start: Start) -> Fit:
    """Trains the fit, and the refit where asked, from where it starts; returns the last of them."""
    state = start.state
    of_refit = start if state is not None and state["phase"] == "refit" else None
    if state is not None:
        fit.losses = fit.world.broadcast_object(fit.world.on_first(lambda: read_losses(folder, "train")))
    if state is not None and of_refit is not None:
        fit.hold(state["before"])
    elif start.found is not None:
        fit.resume(start.found)
    _describe(fit, start.notes)
    if of_refit is None:
        if state is not None:
            _tell(fit)
        fit.run()
    return _refit(fit, folder, start, of_refit) if fit.config.train.refit else fit


def _tell(fit: Fit) -> None:
    fit.writer.write("resume", fit.step, {"phase": fit.phase, "epoch": fit.epoch, "world_size": fit.world.size})
    fit.writer.say(f"resumed ({fit.phase}) after step {fit.step} of {fit.num_steps}, in epoch {fit.epoch}")


def _refit(fit: Fit, folder: Path, start: Start, of_refit: Start | None) -> Fit:
    """Returns a fresh fit on train and valid together, for as many epochs as the best step took, under the same schedule."""
    job = build_job(fit.config, fit.world, fold_valid=True)
    if start.init is not None:
        fit.writer.say(start_from(job, start.init))
    options: dict[str, Any] = {"samples": fit.samples, "seconds": fit.seconds, "checkpoints": fit.checkpoints, "interrupt": fit.interrupt}
    again = Fit(job, build_sampler(job), fit.writer, folder, refit_of=fit, **options)
    fit.writer.say(f"refit on train and valid together: {again.num_steps} steps")
    if of_refit is not None and of_refit.found is not None:
        again.losses = fit.world.broadcast_object(fit.world.on_first(lambda: read_losses(folder, "refit")))
        again.resume(of_refit.found)
        _tell(again)
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


def _open(job: Job, folder: Path, state: dict[str, Any] | None, *, again: bool = False) -> tuple[list[str], TextIO]:
    """Writes config and schema; an earlier run in that folder is moved aside, and a note says where, unless it goes on.

    Args:
        job: the run.
        folder: its folder.
        state: from which the run in that folder goes on.
        again: whether that run is this one, without a state too.

    Returns:
        The notes, and the open lock that tells other runs that this one lives.
    """
    check_run_dir(folder)
    check_free(folder)
    notes = []
    if state is None and not again and ((folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir()):
        number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        moved = folder.rename(folder.with_name(f"{folder.name}.{number}"))
        notes.append(f"an earlier run was moved to {folder}.{number}")
    folder.mkdir(parents=True, exist_ok=True)
    if notes:
        keep_cost(moved, folder)
    held = (folder / _LOCK).open("a")  # to empty it before it is ours would take the holder's names away
    _lock(held, folder)
    held.truncate(0)
    held.write("".join(f"{name}\n" for name in sorted(job.world.launch.names)))
    held.flush()
    shutil.rmtree(folder / "errors", ignore_errors=True)
    if state is not None or again:
        notes += drop_beyond(folder, state or _NOTHING)
    write_whole(folder / "config.yaml", dump_yaml(to_dict(job.config)))
    write_contract(job.store, folder)
    return notes, held


_LOCK = "run.lock"
_NOTHING = {"phase": "train", "step": 0, "evaluated_at": -1, "lines": {}}
_TODO = "  then:   the same command with --resume goes on from the last whole checkpoint"


def _is_second_start(folder: Path, world: World) -> bool:
    """Returns whether the torchrun or Slurm job that started these ranks has begun the run in this folder."""
    try:
        begun_by = set((folder / _LOCK).read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return False
    return bool(begun_by & world.launch.again)


def check_free(folder: Path) -> None:
    """Refuses the folder of a run that still lives; the kernel lets go of a dead run's lock."""
    if not (folder / _LOCK).exists():
        return
    with (folder / _LOCK).open("r+") as other:
        _lock(other, folder)


def _lock(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        todo = "wait for it, or set another --train.run_dir"
        raise problem(
            "Another run is at work in this folder", got="its lock is held", wanted="a free folder", where=folder, todo=todo
        ) from None


def _describe(fit: Fit, notes: Sequence[str]) -> None:
    job, plan, say = fit.job, fit.sampler.plan, fit.writer.say
    for note in notes:
        say(note)
    sizes = ", ".join(f"{name} {len(view):,}" for name, view in job.views.items())
    say(f"{job.world.size} rank(s) on {job.world.device.type}; samples: {sizes}; cut to max_len: {job.views['train'].num_cut:,} events")
    say(f"{fit.epoch_steps} steps an epoch, {fit.num_steps} in all; planned imbalance {plan.imbalances(64).mean():.4f} (max/mean cost)")
    say(f"cost of a history: {job.cost_from}")
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
