"""One step of a fit: rates, forward, backward, and what is said and written when its numbers are bad or its gradients explode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torchrec.optim.keyed import CombinedOptimizer

from distrag.batch import RaggedBatch
from distrag.embedding.boundary import never
from distrag.problem import problem
from distrag.training.build import Job
from distrag.training.diagnose import FOLDER, MOST_REPORTS, Report, report_bad_step
from distrag.training.gradients import Explosion, GradientWatch, dense_norms, explain_explosion, find_outlier, vector_squares, watched_keys
from distrag.training.guard import Guard
from distrag.training.metrics import MetricsWriter
from distrag.training.optim import Schedule
from distrag.training.step import StepResult, check_count, train_step
from distrag.training.timing import StepWatch


class Stepper:
    """Runs the steps of one fit; every rank runs the same ones.

    Args:
        job: everything before the first step.
        optimizer: from `build_optimizer`.
        schedule: sets the rates of a step.
        writer: where warnings go.
        run_dir: where batches of skipped steps are written.

    Attributes:
        guard: loss scale and count of skipped steps; a checkpoint holds it.
        factor: share of the full rates that the last step used.
    """

    def __init__(self, job: Job, optimizer: CombinedOptimizer, schedule: Schedule, writer: MetricsWriter, run_dir: Path) -> None:
        train = job.config.train
        self.job, self.optimizer, self.schedule, self.writer, self.run_dir = job, optimizer, schedule, writer, run_dir
        self.guard = Guard(train.loss_scale, fixed=False) if train.precision == "fp16" else Guard()
        self.watch = StepWatch(job.parallel.plain.tables if job.world.size > 1 else None, job.world.device)
        self.factor = 1.0
        self._gradients = GradientWatch()
        self._rooms: dict[str, float] = {}
        self._squares = torch.zeros(len(watched_keys(job.parallel)), dtype=torch.float64)
        self._explosion = Explosion()

    def run(
        self,
        batch: RaggedBatch,
        step: int,
        *,
        logs: bool,
        longest: int,
        waited_s: Callable[[], float],
        following: RaggedBatch | None = None,
        stop: Callable[[], bool] = never,
    ) -> StepResult:
        """Runs one step and returns what it left.

        Args:
            batch: this rank's share.
            step: number of the global step, from 1.
            logs: whether its numbers are wanted.
            longest: longest history of the step, over all ranks.
            waited_s: tells for how long this rank had waited for its batch, in seconds.
            following: the batch after it, to begin its exchange of ids.
            stop: tells whether this rank was asked to stop.

        Raises:
            ValueError: the last `train.max_bad_steps` steps all had to be skipped; the same on every rank.
        """
        job, config = self.job, self.job.config
        # Steps that were skipped do not count: neither warm-up nor cosine go on in them.
        self.factor = self.schedule.set(self.guard.num_updates)
        if config.debug:
            batch.check(job.collate.table_rows)
        scale = self.guard.scale
        self.watch.begin()
        result = train_step(
            job.parallel,
            self.optimizer,
            batch,
            job.world,
            clip_norm=config.optim.clip_norm,
            watch=self.watch,
            guard=self.guard,
            stop=stop,
            following=following,
            micro_batches=config.batching.micro_batches,
            inspect=lambda dense, vectors: self._inspect(batch, dense, vectors, scale, longest, logs=logs),
        )
        self.watch.end(waited_s())
        if config.debug:
            check_count(batch, result.count, job.world)
        if result.skipped:
            self._skip(batch, step, scale)
        return result

    def numbers(self) -> torch.Tensor:
        """Returns what this rank adds to a line of metrics, float64: squared norms of the watched keys, an explosion since the last."""
        explosion, self._explosion = self._explosion, Explosion()
        return torch.cat([self._squares.cpu(), torch.tensor(astuple(explosion), dtype=torch.float64)])

    def tell(self, numbers: torch.Tensor) -> dict[str, float]:
        """Returns the norm of the gradient of each room of the last logged step; warns of an explosion.

        Args:
            numbers: `numbers()` of each rank, `[W, ...]`.
        """
        keys = watched_keys(self.job.parallel)
        told = explain_explosion([Explosion(*row) for row in numbers[:, len(keys) :].tolist()])
        if told:
            self.writer.say(told)
        squares = numbers[:, : len(keys)].sum(0).tolist()
        return {**self._rooms, **{f"vectors {key}": float(square) ** 0.5 for key, square in zip(keys, squares, strict=True)}}

    def _inspect(self, batch: RaggedBatch, dense: float, vectors: float, scale: float, longest: int, *, logs: bool) -> None:
        if logs:
            self._rooms = dense_norms(self.job.parallel)
            self._squares = vector_squares(self.job.parallel) / (scale * self.job.world.size) ** 2
        # Each rank decides for itself, from a norm that may differ in its last bit: what it found travels with the next line of metrics.
        times = self._gradients.note((dense**2 + vectors**2) ** 0.5)
        if times:
            self._explosion = find_outlier(self.job.parallel, batch, times, longest)

    def _skip(self, batch: RaggedBatch, step: int, scale: float) -> None:
        guard, world, config = self.guard, self.job.world, self.job.config
        self._squares = torch.zeros(len(watched_keys(self.job.parallel)), dtype=torch.float64)
        self._rooms = {}
        found = Report(f"not looked into; the first {MOST_REPORTS} are", is_lasting=False)
        if guard.num_skipped <= MOST_REPORTS:
            factor = scale * world.size / max(batch.global_count, 1e-30)
            found = report_bad_step(self.job.parallel, batch, factor, config.batching.micro_batches, world, self.run_dir, step)
        values: dict[str, Any] = {"epoch": batch.epoch, "cause": found.text, "num_skipped": guard.num_skipped, "loss_scale": guard.scale}
        self.writer.write("skipped", step, values)
        change = "" if guard.fixed else f"; loss scale {scale:g} -> {guard.scale:g}"
        self.writer.say(f"step {step} skipped on all ranks, nothing was updated: {found.text}{change}")
        if found.is_lasting or guard.skipped_in_row >= config.train.max_bad_steps:
            todo = (
                f"look at the batches in {self.run_dir / FOLDER}; lower --optim.lr and --optim.table_lr, add --optim.warmup_steps or "
                "--optim.clip_norm; raise --train.max_bad_steps to go on"
            )
            where = f"step {step}, epoch {batch.epoch}"
            got = f"{guard.skipped_in_row} in a row were skipped; the last: {found.text}"
            raise problem("Steps without finite numbers", got=got, wanted="a finite loss and gradient", where=where, todo=todo)


def with_following(batches: Iterable[RaggedBatch], *, ahead: bool) -> Iterator[tuple[RaggedBatch, RaggedBatch | None]]:
    """Yields each batch with the one after it; without `ahead` that is not fetched, and None."""
    if not ahead:
        for batch in batches:
            yield batch, None
        return
    before: RaggedBatch | None = None
    for batch in batches:
        if before is not None:
            yield before, batch
        before = batch
    if before is not None:
        yield before, None
