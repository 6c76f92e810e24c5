"""Whether a config trains the same on several numbers of ranks: it is trained for some steps on each of them here, and compared."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distrag.config import RunConfig, check_number, read_config, to_dict
from distrag.config.limits import INT32, Range
from distrag.problem import problem
from distrag.training.build import Plain, build_job, build_plain
from distrag.training.checks import check_length
from distrag.training.local_ranks import run_local_ranks
from distrag.training.locality import open_run_store
from distrag.training.plan import Subject, open_subject
from distrag.training.trace import Array, Difference, compare_states, read_state, save_state, train_steps
from distrag.training.unsharded import train_unsharded
from distrag.world import World, launched_size

MAX_SIZE = 64
"""Ranks that one machine is asked to hold."""
STEPS, TOLERANCE = 20, 1e-6
_EPS_PER_RATE = 5e-3
"""Smallest eps of an adaptive optimizer, as a multiple of its rate. A first gradient of about the size of eps is divided by itself, its
rounding too; with so much eps what float32 leaves uncertain of a gradient, about 1e-9, moves no weight by more than the tolerance."""
_UNSHARDED = "unsharded"


@dataclass(frozen=True)
class Verified:
    """One way of training, beside one rank.

    Attributes:
        name: `2 ranks`, or `unsharded, 1 process`.
        world_size: ranks.
        idle: ranks without a sample, summed over the steps.
        loss: largest difference of a step's loss, as a share of the loss where that is above 1.
        dense: largest difference of a dense parameter or buffer.
        tables: largest difference in a table.
        first_step: first step whose loss differs by more than the tolerance, 1-based; 0 where none does.
        where: the element of `dense` and `tables` that differs most.
        got: its value here.
        wanted: its value on one rank.
        exact: nothing differs by more than the tolerance.
        note: why it was left out; empty where it was not.
        seconds: that it took.
    """

    name: str
    world_size: int
    idle: int
    loss: float = 0.0
    dense: float = 0.0
    tables: float = 0.0
    first_step: int = 0
    where: str = ""
    got: float = 0.0
    wanted: float = 0.0
    exact: bool = True
    note: str = ""
    seconds: float = 0.0


def verify(
    config: RunConfig | Mapping[str, Any] | Sequence[str],
    world_sizes: Sequence[int] = (1, 2),
    *,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Trains a config for some steps on each number of ranks, and without sharding, and returns how far they are from one rank.

    The ranks are processes of this machine. Encoders and losses that this process has added to ENCODERS or LOSSES are known to them, if
    they can be imported. Nothing is written but into a temporary folder.

    Args:
        config: the run; what is changed for the comparison is in the answer.
        world_sizes: numbers of ranks; one rank is always among them.
        steps: global steps to train.
        tolerance: largest difference that is still equal.

    Raises:
        ValueError: a config, store, number of ranks or device that cannot be trained, before anything starts; or a rank failed.
    """
    run = read_config(config)
    if launched_size() > 1:
        todo = "start `distrag verify` as one plain process"
        raise problem("verify starts its own ranks", got=f"{launched_size()} processes", wanted=1, where="the launcher", todo=todo)
    check_number(steps, Range(1, INT32), "--steps")
    check_number(tolerance, Range(0, 1e6, open_low=True), "--tolerance")
    sizes = _check_sizes(world_sizes)
    device = _choose_device(run, sizes[-1])
    changed, changes = _comparable(run, steps, device)
    subjects = _check_subjects(changed, sizes)
    changed = dataclasses.replace(changed, batching=dataclasses.replace(changed.batching, cost=subjects[1].cost))
    with tempfile.TemporaryDirectory(prefix="distrag-verify-") as folder:
        return {
            "world_sizes": sizes,
            "steps": steps,
            "device": device,
            "tolerance": tolerance,
            "changed": changes,
            "tables": [str(placement) for placement in subjects[sizes[-1]].checked.placements],
            **_compare_all(changed, subjects, device, tolerance, Path(folder)),
        }


def _check_sizes(world_sizes: Sequence[int]) -> list[int]:
    if not world_sizes:
        raise problem("No number of ranks", got="none", wanted="such as 1,2", where="--world-sizes", todo="name some numbers of ranks")
    for size in world_sizes:
        check_number(size, Range(1, MAX_SIZE), "--world-sizes")
    return sorted({1, *world_sizes})


def _choose_device(run: RunConfig, most: int) -> str:
    """Returns `cuda` where there is a GPU for each of the most ranks, or is asked for, else `cpu`."""
    count = torch.cuda.device_count() if run.train.device != "cpu" else 0
    if run.train.device == "cuda" and count < most:
        todo = "verify fewer ranks, or set --train.device=cpu"
        raise problem("Not enough GPUs", got=f"{count} GPUs", wanted=f"{most}, one for each rank", where="--world-sizes", todo=todo)
    return "cuda" if count >= most else "cpu"


def _comparable(run: RunConfig, steps: int, device: str) -> tuple[RunConfig, list[str]]:
    """Returns the config with what would keep two numbers of ranks from being comparable changed, and these changes in words."""
    budget = run.batching.global_tokens or run.batching.max_tokens
    wanted: dict[str, tuple[Any, str]] = {
        "batching.global_tokens": (budget, "the budget of one rank as that of a whole step, or the steps would differ"),
        "batching.max_samples": (None, "a limit of one rank does not fit every number of them"),
        "batching.locality": ("global", "which samples form a step would depend on the nodes"),
        "optim.warmup_steps": (0, "full rates from the first step on show more"),
        "optim.schedule": ("constant", "the same"),
        "optim.eps": (max(run.optim.eps, _EPS_PER_RATE * run.optim.lr), "or an optimizer blows rounding up"),
        "train.precision": ("fp32", "in half precision numbers of ranks are close, not equal"),
    }
    if run.tables.optimizer == "adagrad" or run.tables.optimizer == "adam":
        wanted["tables.eps"] = max(run.tables.eps, _EPS_PER_RATE * run.optim.table_lr), "the same"
    changes = []
    for key, (value, why) in wanted.items():
        former = getattr(getattr(run, key.split(".")[0]), key.split(".")[1])
        if former != value:
            changes.append(f"{key} {_word(former)} -> {_word(value)}: {why}")
            run = _replace(run, key, value)
    silent = {"max_steps": steps, "num_epochs": 0, "log_every": 1, "eval_every": 0, "patience": 0, "refit": False, "save_every": 0}
    for name, setting in {**silent, "resume": False, "tensorboard": False, "log_samples": False, "device": device}.items():
        run = _replace(run, f"train.{name}", setting)
    return run, changes


def _word(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _replace(run: RunConfig, key: str, value: Any) -> RunConfig:
    section, name = key.split(".")
    parts: dict[str, Any] = {section: dataclasses.replace(getattr(run, section), **{name: value})}
    return dataclasses.replace(run, **parts)


def _check_subjects(run: RunConfig, sizes: Sequence[int]) -> dict[int, Subject]:
    """Returns what each number of ranks trains; refuses the sizes that cannot work, all of them together."""
    subjects: dict[int, Subject] = {}
    refused: dict[int, str] = {}
    for size in sizes:
        try:
            subjects[size] = open_subject(run, size, ranks_per_node=size)
            check_length(run, subjects[size].plan().num_steps)
        except ValueError as error:
            if size == 1:
                raise
            refused[size] = str(error)
    if refused:
        told = "; ".join(f"{size} ranks: {' '.join(text.split())}" for size, text in refused.items())
        fitting = ", ".join(str(size) for size in sizes if size not in refused)
        todo = f"verify with --world-sizes {fitting.replace(' ', '')}, or change the config"
        raise problem("The config cannot be trained on so many ranks", got=told, wanted=fitting, where="--world-sizes", todo=todo)
    return subjects


def _compare_all(run: RunConfig, subjects: Mapping[int, Subject], device: str, tolerance: float, folder: Path) -> dict[str, Any]:
    one = _train(run, folder, 1, device)
    rows = []
    for size in (0, *(size for size in subjects if size > 1)):
        its = _train(run, folder, size, device)
        name = f"{size} ranks" if size else f"{_UNSHARDED}, 1 process"
        idle = _idle(subjects[size], run.train.max_steps) if size else 0
        rows.append(_verified(its, one, Verified(name, size or 1, idle, seconds=its.seconds), tolerance))
    start = read_state(_folder(folder, 0) / "start")
    names = (lambda name: not _is_table(name), _is_table)
    moved = dict(zip(("dense", "tables"), (compare_states(one.states[0], start, takes).largest for takes in names), strict=True))
    return {"losses": one.losses, "moved": moved, "exact": all(row.exact for row in rows), "rows": [asdict(row) for row in rows]}


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    states: list[dict[str, Array]]
    note: str
    seconds: float


def _train(run: RunConfig, folder: Path, size: int, device: str) -> _Trained:
    """Returns what `size` ranks come to; 0 is one process without sharding."""
    started, place = time.perf_counter(), _folder(folder, size)
    for name in ("start", "end"):
        (place / name).mkdir(parents=True)
    settings = to_dict(_replace(run, "train.run_dir", str(place / "run")))
    run_local_ranks(_rank, max(1, size), (settings, str(place), size), place, device=device, timeout_s=run.train.timeout_s)
    answer = json.loads((place / "answer.json").read_text())
    states = [] if answer["note"] else [read_state(place / "end", rank) for rank in range(max(1, size))]
    return _Trained(answer["losses"], states, answer["note"], time.perf_counter() - started)


def _folder(folder: Path, size: int) -> Path:
    return folder / (f"ranks-{size}" if size else _UNSHARDED)


def _rank(world: World, settings: dict[str, Any], place: str, size: int) -> None:
    """Trains on one rank and writes what came of it."""
    run, note = read_config(settings), ""
    if size:
        job = build_job(run, world)
        losses = train_steps(job)
        save_state(job.parallel.model, Path(place) / "end", world)
    else:
        plain = build_plain(run, open_run_store(run, world)[0], world, None)
        save_state(plain.model, Path(place) / "start", world)
        losses, note = _try_unsharded(run, plain, world)
        save_state(plain.model, Path(place) / "end", world)
    if world.rank == 0:
        (Path(place) / "answer.json").write_text(json.dumps({"losses": losses, "note": note}))


def _try_unsharded(run: RunConfig, plain: Plain, world: World) -> tuple[list[float], str]:
    """Returns the losses of training without sharding, or none and why it is left out."""
    if run.tables.optimizer == "adam" and plain.model.tables.sharded is not None:
        return [], "left out: fused Adam moves only the rows of a step, which no ordinary optimizer does"
    # weights, gradients and two states of Adam
    needed = 4 * sum(p.numel() * p.element_size() for p in plain.model.parameters())
    if needed > world.free_bytes():
        return [], f"left out: one process would need {needed / 2**30:.3g} GiB for whole tables with their gradients"
    return train_unsharded(run, plain, world.device), ""


def _is_table(name: str) -> bool:
    return name.startswith("tables.")


def _idle(subject: Subject, steps: int) -> int:
    """Returns how often a rank had no sample, over the steps as far as they are of the first epoch."""
    plan = subject.plan()
    return sum(int((plan.rank_samples(step) == 0).sum()) for step in range(min(steps, plan.num_steps)))


def _verified(its: _Trained, one: _Trained, row: Verified, tolerance: float) -> Verified:
    if its.note:
        return dataclasses.replace(row, note=its.note)
    if len(its.losses) != len(one.losses):
        got = f"{len(its.losses)} steps with finite numbers, on 1 rank {len(one.losses)}"
        return dataclasses.replace(row, exact=False, note=got)
    apart = np.abs(np.subtract(its.losses, one.losses)) / np.maximum(1.0, np.abs(one.losses))
    dense, tables = Difference(), Difference()
    for state in its.states:  # every rank has its own copy of what is replicated
        dense = dense.worse(compare_states(state, one.states[0], lambda name: not _is_table(name)))
        tables = tables.worse(compare_states(state, one.states[0], _is_table))
    worst, over = dense.worse(tables), np.flatnonzero(~(apart <= tolerance))
    return dataclasses.replace(
        row,
        loss=float(apart.max()),
        dense=dense.largest,
        tables=tables.largest,
        first_step=int(over[0]) + 1 if len(over) else 0,
        where=worst.where,
        got=worst.got,
        wanted=worst.wanted,
        exact=not len(over) and dense.largest <= tolerance and tables.largest <= tolerance,
    )
