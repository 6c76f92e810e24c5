"""One fit: a job trained step by step, evaluated every so often, its best state kept."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from distrag.batch import RaggedBatch
from distrag.batching.loader import Loader, padding_share
from distrag.batching.nodes import NodeSampler
from distrag.batching.sampler import TokenBudgetSampler
from distrag.checkpoint import save_checkpoint
from distrag.problem import problem
from distrag.training.build import Job, agreed
from distrag.training.checks import check_length
from distrag.training.held_out import Metrics, choose_metric, evaluate_view
from distrag.training.metrics import MetricsWriter
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.step import StepResult, check_count, train_step

LOWER_IS_BETTER = ("log_loss", "ne")


class Fit:
    """Trains one job; every rank runs the same steps.

    Args:
        job: everything before the first step.
        sampler: its planned epochs, from `build_sampler`.
        writer: where numbers go.
        checkpoint: folder of the best state.
        num_steps: stop after as many steps; otherwise after the config's max_steps or num_epochs.
        schedule_steps: length that the learning-rate schedule is made for; otherwise `num_steps`.
        selects: evaluate on valid, keep the best, stop early; False for a refit, which has nothing left to select on.

    Attributes:
        step: global steps done.
        epoch: epochs done or begun.
        best_step: step of the best state.
        best_valid: its metrics on valid.
        losses: loss of each logged step.
    """

    def __init__(
        self,
        job: Job,
        sampler: TokenBudgetSampler,
        writer: MetricsWriter,
        checkpoint: Path,
        *,
        num_steps: int = 0,
        schedule_steps: int = 0,
        selects: bool = True,
    ) -> None:
        self.job, self.config, self.world = job, job.config, job.world
        self.sampler, self.writer, self.checkpoint, self.selects = sampler, writer, checkpoint, selects
        self.num_steps = num_steps or count_steps(job, self.sampler)
        # Epochs differ by a step or two, so whole epochs are counted as such; num_steps is then what schedule and progress go by.
        self.max_steps, self.max_epochs = (num_steps, 0) if num_steps else (self.config.train.max_steps, self.config.train.num_epochs)
        self.optimizer = build_optimizer(job.parallel, self.config.optim, self.config.tables)
        self.schedule = Schedule(self.optimizer, self.config.optim, schedule_steps or self.num_steps)
        self.metric = choose_metric(job)
        self.step = self.epoch = self.best_step = self.misses = 0
        self.evaluated_at = -1
        self.best: float | None = None
        self.best_valid: Metrics = {}
        self.losses: list[float] = []

    def run(self) -> None:
        """Trains to the last step, or until valid has not improved for `train.patience` evaluations."""
        while not self._is_done():
            self._run_epoch()
        if self.selects and self.evaluated_at != self.step:
            self._evaluate()
        if not self.selects:
            self._save({"step": self.step, "epoch": self.epoch})

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)
        train = self.job.views["train"]
        loader = Loader(self.job.collate, train, self.sampler, device=self.world.device, prefetch=self.job.prefetch)
        self.job.parallel.model.train()
        clock = _Clock(loader, self.world.device)
        every = self.config.train.eval_every
        for batch in loader:
            self._run_step(batch, clock)
            if 0 < self.max_steps <= self.step:
                break
            if self.selects and every and self.step % every == 0:
                self._evaluate()
                clock.restart()
                if self._gave_up():
                    break
        self.epoch += 1
        if self.selects and not every:
            self._evaluate()

    def _run_step(self, batch: RaggedBatch, clock: _Clock) -> None:
        config, world = self.config, self.world
        factor = self.schedule.set(self.step)
        logs = (self.step + 1) % config.train.log_every == 0 or self.step == 0 or self.step + 1 == self.num_steps
        if config.debug:
            batch.check(self.job.collate.table_rows)
        result = train_step(self.job.parallel, self.optimizer, batch, world, clip_norm=config.optim.clip_norm, want_norm=logs)
        if config.debug:
            check_count(batch, result.count, world)
        self.step += 1
        clock.count(batch)
        if logs:
            self._log(batch, result, factor, clock)

    def _log(self, batch: RaggedBatch, result: StepResult, factor: float, clock: _Clock) -> None:
        loss = float(self.world.all_reduce_sum(result.loss_sum.clone())) / max(batch.global_count, 1e-12)
        _check_loss(loss, self.step, self.epoch)
        self.losses.append(loss)
        plan = self.sampler.plan
        lengths = self.sampler.lengths[plan.step_samples(batch.step)]
        values: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": loss,
            "global_tokens": batch.num_tokens_global,
            "samples": len(lengths),
            "tokens_per_s": clock.tokens_per_s(),
            "imbalance": plan.imbalance(batch.step),
            "padded_batch_padding_share": padding_share(lengths),
            "data_wait_share": clock.wait_share(),
            "grad_norm": float(result.grad_norm),
            "lr": self.config.optim.lr * factor,
            "table_lr": self.config.optim.table_lr * factor,
        }
        self.writer.write("train" if self.selects else "refit", self.step, values)
        self.writer.show(self.step, f"loss {loss:.4f}  {values['tokens_per_s']:,.0f} tokens/s")
        clock.restart()

    def _evaluate(self) -> None:
        self.evaluated_at = self.step
        valid = evaluate_view(self.job, "valid")
        self.writer.write("valid", self.step, {"epoch": self.epoch, **valid})
        score = valid[self.metric]
        better = score is not None and (self.best is None or (score < self.best if self.metric in LOWER_IS_BETTER else score > self.best))
        self.misses = 0 if better else self.misses + 1
        shown = "undefined" if score is None else f"{score:.4f}"
        self.writer.say(f"step {self.step}: valid {self.metric} {shown}{' (best)' if better else ''}")
        if better or not self.best_valid:
            self.best, self.best_step, self.best_valid = score, self.step, valid
            self._save({"step": self.step, "epoch": self.epoch, "metric": self.metric, "value": score})

    def _save(self, extra: dict[str, Any]) -> None:
        save_checkpoint(self.checkpoint, self.job.parallel, self.optimizer, extra, self.world)

    def _is_done(self) -> bool:
        return self._gave_up() or 0 < self.max_steps <= self.step or 0 < self.max_epochs <= self.epoch

    def _gave_up(self) -> bool:
        return 0 < self.config.train.patience <= self.misses


def _check_loss(loss: float, step: int, epoch: int) -> None:
    """Stops a run that has lost its numbers; the loss is the same on every rank, so every rank stops."""
    if not math.isfinite(loss):
        todo = "lower --optim.lr and --optim.table_lr, add --optim.warmup_steps or --optim.clip_norm; --debug checks every batch"
        raise problem("The loss is not finite", got=loss, wanted="a number", where=f"step {step}, epoch {epoch}", todo=todo)


def build_sampler(job: Job) -> TokenBudgetSampler:
    """Returns the sampler of the train view.

    Raises:
        ValueError: a budget that does not fit the histories; the same on every rank.
    """
    batching = job.config.batching
    return agreed(
        job.world,
        lambda: NodeSampler(
            job.views["train"],
            **job.node_options("train"),
            max_tokens=None if batching.global_tokens else batching.max_tokens,
            global_tokens=batching.global_tokens,
            max_samples=batching.max_samples,
            bucket_steps=batching.bucket_steps,
            num_replicas=job.world.size,
            rank=job.world.rank,
            seed=job.config.train.seed,
            cost=job.cost,
        ),
    )


def count_steps(job: Job, sampler: TokenBudgetSampler) -> int:
    """Returns the global steps that the config asks for: the smaller of `max_steps` and `num_epochs`, of those that are set.

    Raises:
        ValueError: neither is set, or an epoch has no step.
    """
    return check_length(job.config, len(sampler))


class _Clock:
    """Times the steps since the last line of metrics."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.restart()

    def restart(self) -> None:
        self.started, self.waited, self.tokens = time.perf_counter(), self.loader.wait_s, 0

    def count(self, batch: RaggedBatch) -> None:
        self.tokens += batch.num_tokens_global

    def tokens_per_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.tokens / max(1e-9, time.perf_counter() - self.started)

    def wait_share(self) -> float:
        return (self.loader.wait_s - self.waited) / max(1e-9, time.perf_counter() - self.started)
