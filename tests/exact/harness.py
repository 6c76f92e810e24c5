"""Trains cases on 1, 2, 3 and 4 gloo ranks and by the reference, and says how far apart they come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distrag.batch import RaggedBatch
from distrag.config import choose_encoder, choose_loss, read_config
from distrag.data.store import open_store
from distrag.training.build import Job, build_job, build_sampler
from distrag.training.checks import check_job
from distrag.training.trace import Array, compare_states, read_state, save_state, train_steps
from distrag.world import start_world
from tests.exact.cases import NUM_STEPS, Case, config
from tests.exact.reference import Plan, Sample, Step, train_reference
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Run:
    """What training a case came to.

    Attributes:
        losses: of each step.
        state: parameters and tables by name.
        idle: rank-steps without a sample.
        samples: of each step, over all ranks.
    """

    losses: list[float]
    state: dict[str, Array]
    idle: int = 0
    samples: tuple[tuple[int, ...], ...] = ()


def run_cases(cases: Sequence[Case], world_size: int, store: Path, folder: Path) -> list[list[Run]]:
    """Returns for each case what every rank came to; all cases run in the same processes."""

    def rank() -> list[tuple[list[float], int, Any]]:
        return [_run_case(case, store, _folder(folder, world_size, i)) for i, case in enumerate(cases)]

    for i in range(len(cases)):
        _folder(folder, world_size, i).mkdir(parents=True)
    answers = run_ranks(rank, world_size, timeout_s=60 + 60 * world_size * len(cases))
    return [
        [Run(losses, read_state(_folder(folder, world_size, i), r), idle, samples) for r, (losses, idle, samples) in enumerate(its)]
        for i, its in enumerate(zip(*answers, strict=True))
    ]


def _folder(folder: Path, world_size: int, case: int) -> Path:
    return folder / f"{world_size}-{case}"


def _run_case(case: Case, store: Path, folder: Path) -> tuple[list[float], int, Any]:
    world = start_world("cpu")
    job = build_job(read_config(config(case, store, folder)), world)
    sampler = build_sampler(job)
    samples, idle = [], 0
    for epoch, step in _steps(sampler):
        sampler.set_epoch(epoch)
        samples.append(tuple(sorted(sampler.plan.step_samples(step).tolist())))
        idle += int((sampler.plan.rank_samples(step) == 0).sum())
    losses = train_steps(job)
    save_state(job.parallel.model, folder, world)
    return losses, idle, tuple(samples)


def _steps(sampler: Any) -> Iterator[tuple[int, int]]:
    epoch = done = 0
    while done < NUM_STEPS:
        sampler.set_epoch(epoch)
        for step in range(min(len(sampler), NUM_STEPS - done)):
            yield epoch, step
            done += 1
        epoch += 1


@dataclass(frozen=True)
class Wanted:
    """What a case has to come to.

    Attributes:
        losses: of each step.
        state: parameters and tables by name.
        spread: how uncertain rounding alone makes each element.
        moved: how far training has moved the array that moved least.
    """

    losses: list[float]
    state: dict[str, Array]
    spread: dict[str, Array]
    moved: float


def run_references(cases: Sequence[Case], store: Path) -> list[Wanted | None]:
    """Returns what the reference comes to for each case that it can follow."""

    def one() -> list[Wanted | None]:
        return [_run_reference(case, store) if case.reference else None for case in cases]

    return run_ranks(one, 1, timeout_s=60 + 60 * len(cases))[0]  # type: ignore[no-any-return]


def _run_reference(case: Case, store: Path) -> Wanted:
    job = build_job(read_config(config(case, store, store.with_name("run"))), start_world("cpu"))
    torch.set_flush_denormal(False)
    start = {n.removeprefix("module."): _whole(v).clone() for n, v in job.parallel.model.state_dict().items()}
    plan, steps = _plan(job), list(_inputs(job))
    losses, trained = train_reference(plan, start, steps)
    state = {name: value.numpy() for name, value in trained.items()}
    spread = {name: np.zeros(value.shape) for name, value in state.items()}
    for seed in () if case.eps == "large" else range(1, _SWAYED + 1):
        swayed = train_reference(plan, start, steps, seed)[1]
        spread = {name: np.maximum(its, np.abs(swayed[name].numpy() - state[name])) for name, its in spread.items()}
    moved = min(float(np.abs(state[name] - value.numpy()).max()) for name, value in start.items())
    return Wanted(losses, state, spread, moved)


def _whole(value: Any) -> torch.Tensor:
    if not hasattr(value, "local_shards"):
        return value.detach()  # type: ignore[no-any-return]
    whole = torch.zeros(value.metadata().size)
    for piece in value.local_shards():
        (row, column), (rows, columns) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
        whole[row : row + rows, column : column + columns] = piece.tensor
    return whole


def _plan(job: Job) -> Plan:
    run, inputs, optim, tables = job.config, job.inputs, job.config.optim, job.config.tables
    encoder, (loss, _, loss_options) = choose_encoder(run)[1], choose_loss(run)
    names = [name.removeprefix("module.") for name in job.parallel.model.state_dict() if ".embeddings." in name]
    fused = {name: (tables.optimizer, optim.table_lr, tables.eps) for name in names if ".sharded." in name}
    plain = {name: (tables.replicated_optimizer, optim.lr, optim.eps) for name in names if ".replicated." in name}
    features = {feature: table.name for table in job.store.schema.tables for feature in table.features}

    def rate(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        if optim.schedule == "constant":
            return 1.0
        share = (step - optim.warmup_steps) / (NUM_STEPS - optim.warmup_steps)
        return optim.min_lr_share + (1 - optim.min_lr_share) * (1 + math.cos(math.pi * share)) / 2

    return Plan(
        encoder={"name": run.encoder.name, **vars(encoder)},  # type: ignore[attr-defined]
        loss={"name": loss, **vars(loss_options)},
        table_of={key: features[key] for key in (*inputs.history_keys, *inputs.context_keys)},
        target=inputs.target,
        join=run.model.join,
        optimizer_of={**fused, **plain},
        clipped_tables=tuple(plain),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        decoupled=optim.name == "adamw",
        clip_norm=optim.clip_norm,
        rate=rate,
    )


def _inputs(job: Job) -> Iterator[Step]:
    sampler, view = build_sampler(job), job.views["train"]
    for epoch, step in _steps(sampler):
        sampler.set_epoch(epoch)
        yield _unpack(job.collate(view.at_epoch(epoch), sampler.plan.step_samples(step), step=step, epoch=epoch), job)


def _unpack(batch: RaggedBatch, job: Job) -> Step:
    lengths = batch.lengths.tolist()
    ids = {key: batch.ids[key].values() for key in job.collate.keys}
    history = {key: ids[key].split(lengths) for key in job.inputs.history_keys}
    numbers = batch.numbers.split(lengths)
    drawn = ids.get(f"{job.inputs.target}:negative", torch.zeros(0, dtype=torch.int64))
    shared = drawn if job.collate.negatives == "shared" else drawn[:0]
    each = drawn.view(sum(lengths), -1) if job.collate.negatives == "per_position" else torch.zeros(sum(lengths), 0, dtype=torch.int64)
    negatives = each.split(lengths)
    following = ids.get(f"{job.inputs.target}:next", torch.zeros(len(lengths), dtype=torch.int64))
    samples = [
        Sample(
            history={key: parts[b] for key, parts in history.items()},
            numbers=numbers[b],
            context_ids={key: int(ids[key][b]) for key in job.inputs.context_keys},
            context=batch.context[b],
            following=int(following[b]),
            negatives=negatives[b],
            label=float(batch.labels[b]),
            weight=float(batch.weights[b]),
        )
        for b in range(len(lengths))
    ]
    return Step(samples, shared)


_SWAYED = 3
LIMIT = 1e-6
"""What float32 may differ by, in a loss, a dense parameter or a row of a table."""


@dataclass(frozen=True)
class Apart:
    """How far a run is from what it should be.

    Attributes:
        loss: largest difference of a step's loss, as a share of it where it is above 1.
        dense: of an element of a dense parameter.
        tables: of an element of a table.
        over: elements that differ by more than the limit.
        unexplained: those of them for which rounding alone, blown up by the optimizer, is no explanation.
        where: the element with the largest difference.
    """

    loss: float
    dense: float
    tables: float
    over: int
    unexplained: int
    where: str

    @property
    def is_close(self) -> bool:
        return self.loss <= LIMIT and self.unexplained == 0


def is_table(name: str) -> bool:
    return ".embeddings." in name


def compare(run: Run, wanted: Run | Wanted) -> Apart:
    """Returns the largest differences of losses, dense parameters and tables."""
    assert len(run.losses) == len(wanted.losses) == NUM_STEPS
    loss = float((np.abs(np.subtract(run.losses, wanted.losses)) / np.maximum(1.0, np.abs(wanted.losses))).max())
    dense = compare_states(run.state, wanted.state, lambda name: not is_table(name))
    tables = compare_states(run.state, wanted.state, is_table)
    over = unexplained = 0
    for name, values in wanted.state.items():
        apart = np.abs(np.asarray(run.state[name], np.float64) - values)
        spread = wanted.spread[name] if isinstance(wanted, Wanted) else 0.0
        over += int((~(apart <= LIMIT)).sum())
        unexplained += int((~(apart <= np.maximum(LIMIT, 4 * spread))).sum())
    return Apart(loss, dense.largest, tables.largest, over, unexplained, dense.worse(tables).where)


def refusals(case: Case, store: Path, world_sizes: Sequence[int]) -> list[str]:
    """Returns for each number of ranks why a case is refused before anything starts; empty where it is not."""
    schema = open_store(store).schema

    def text(build: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "", build()
        except ValueError as error:
            return str(error), None

    refused, run = text(lambda: read_config(config(case, store, store.with_name("run"))))
    return [
        refused or text(lambda size=size: check_job(run, schema, size, device="cpu", limit_bytes=None))[0]  # type: ignore[misc]
        for size in world_sizes
    ]
