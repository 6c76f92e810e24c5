"""BATCHES -> A MODEL: trains a config from its first step to its final test."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from distrag.batch import RaggedBatch
from distrag.batching.loader import Loader
from distrag.batching.sampler import TokenBudgetSampler
from distrag.checkpoint import load_checkpoint, save_checkpoint
from distrag.config import RunConfig, read_config, to_dict
from distrag.data.schema import save_schema
from distrag.problem import problem
from distrag.training.build import agreed, build_job
from distrag.training.held_out import Metrics, choose_metric, evaluate_view
from distrag.training.metrics import MetricsWriter, finite
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.step import StepResult, check_count, train_step
from distrag.world import World, end_world, start_world


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        run_dir: folder with everything the run wrote.
        num_steps: global steps trained.
        num_epochs: epochs begun.
        best_step: step of the best checkpoint.
        valid: metrics of the valid view at that step.
        test: metrics of the test view at that step.
        seconds: wall time of training and evaluation.
        losses: loss of each logged step, in order.
    """

    run_dir: Path
    num_steps: int
    num_epochs: int
    best_step: int
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
    world = start_world(run.train.device, timeout_s=run.train.timeout_s)
    try:
        return _Training(run, world).run()
    finally:
        end_world(world)


class _Training:
    """One run: its state between steps."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        self.run_dir = Path(config.train.run_dir)
        self.job = build_job(config, world)
        self.optimizer = build_optimizer(self.job.parallel, config.optim, config.tables)
        self.sampler = self._build_sampler()
        self.num_steps = self._count_steps()
        self.schedule = Schedule(self.optimizer, config.optim, self.num_steps)
        self.metric = choose_metric(self.job)
        self.step = self.epoch = self.best_step = self.misses = 0
        self.best: float | None = None
        self.best_valid: Metrics = {}
        self.losses: list[float] = []

    def _build_sampler(self) -> TokenBudgetSampler:
        batching, world = self.config.batching, self.world
        lengths = self.job.views["train"].lengths
        return agreed(
            world,
            lambda: TokenBudgetSampler(
                lengths,
                max_tokens=None if batching.global_tokens else batching.max_tokens,
                global_tokens=batching.global_tokens,
                max_samples=batching.max_samples,
                bucket_steps=batching.bucket_steps,
                num_replicas=world.size,
                rank=world.rank,
                seed=self.config.train.seed,
                cost=self.job.cost,
            ),
        )

    def _count_steps(self) -> int:
        train, per_epoch = self.config.train, len(self.sampler)
        if per_epoch == 0:
            todo = "prepare a store with samples, or change data.split"
            raise problem("No sample to train on", got="0 steps in an epoch", wanted="at least 1", where="the train view", todo=todo)
        by_epochs = train.num_epochs * per_epoch
        limits = [limit for limit in (train.max_steps, by_epochs) if limit > 0]
        if not limits:
            todo = "set --train.max_steps or --train.num_epochs"
            raise problem("The run has no length", got="max_steps 0, num_epochs 0", wanted="one of them above 0", where="train", todo=todo)
        return min(limits)

    def run(self) -> RunResult:
        started = time.perf_counter()
        self.writer = self._open()
        try:
            self._describe()
            while self.step < self.num_steps and not self._stopped_early():
                self._run_epoch()
            if self.best_step != self.step and not self._stopped_early():
                self._evaluate()
            result = self._finish(started)
        finally:
            self.writer.close()
        return result

    def _open(self) -> MetricsWriter:
        def write() -> None:
            if self.world.rank == 0:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                (self.run_dir / "config.yaml").write_text(yaml.safe_dump(to_dict(self.config), sort_keys=False))
                save_schema(self.job.store.schema, self.run_dir / "schema.yaml")
                (self.run_dir / "metrics.jsonl").unlink(missing_ok=True)

        agreed(self.world, write)
        train = self.config.train
        return MetricsWriter(self.run_dir, active=self.world.rank == 0, tensorboard=train.tensorboard, num_steps=self.num_steps)

    def _describe(self) -> None:
        views, plan = self.job.views, self.sampler.plan
        sizes = ", ".join(f"{name} {len(view):,}" for name, view in views.items())
        say = self.writer.say
        say(f"{self.world.size} rank(s) on {self.world.device.type}; samples: {sizes}; cut to max_len: {views['train'].num_cut:,} events")
        say(f"{plan.num_steps} steps an epoch, {self.num_steps} in all; planned imbalance {plan.imbalances().mean():.4f} (max/mean cost)")
        for placement in self.job.placements:
            say(f"table {placement}")
        counts = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in self.job.parallel.plain.named_children()
            if name != "tables"
        }
        say("dense parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items() if count))

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)
        config = self.config
        prefetch = 0 if config.debug else config.batching.prefetch
        loader = Loader(self.job.collate, self.job.views["train"], self.sampler, device=self.world.device, prefetch=prefetch, training=True)
        self.job.parallel.model.train()
        clock = _Clock(loader)
        for batch in loader:
            self._run_step(batch, clock)
            if self.step >= self.num_steps:
                break
            if config.train.eval_every and self.step % config.train.eval_every == 0:
                self._evaluate()
                clock.restart()
                if self._stopped_early():
                    break
        self.epoch += 1
        if not config.train.eval_every and not self._stopped_early():
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
        self.losses.append(loss)
        plan = self.sampler.plan
        lengths = self.job.views["train"].lengths[plan.step_samples(batch.step)]
        values = {
            "epoch": self.epoch,
            "loss": loss,
            "global_tokens": batch.num_tokens_global,
            "samples": len(lengths),
            "tokens_per_s": clock.tokens_per_s(),
            "imbalance": plan.imbalance(batch.step),
            "padded_batch_padding_share": 1.0 - lengths.sum() / max(1, len(lengths) * int(lengths.max(initial=0))),
            "data_wait_share": clock.wait_share(),
            "grad_norm": float(result.grad_norm),
            "lr": self.config.optim.lr * factor,
            "table_lr": self.config.optim.table_lr * factor,
        }
        clock.restart()
        self.writer.write("train", self.step, values)
        self.writer.show(self.step, f"loss {loss:.4f}  {values['tokens_per_s']:,.0f} tokens/s")

    def _evaluate(self) -> None:
        valid = evaluate_view(self.job, "valid")
        self.writer.write("valid", self.step, {"epoch": self.epoch, **valid})
        score = valid.get(self.metric)
        if score is None and self.metric not in valid:
            wanted = sorted(valid)
            raise problem("No such metric", got=self.metric, wanted=wanted, where="train.metric", todo="name one of these")
        better = score is not None and (self.best is None or score > self.best)
        self.misses = 0 if better else self.misses + 1
        self.writer.say(
            f"step {self.step}: valid {self.metric} {score if score is None else format(score, '.4f')}{' (best)' if better else ''}"
        )
        if better or not self.best_valid:
            self.best, self.best_step, self.best_valid = score, self.step, valid
            extra = {"step": self.step, "epoch": self.epoch, "metric": self.metric, "value": score}
            save_checkpoint(self.run_dir / "checkpoints" / "best", self.job.parallel, self.optimizer, extra, self.world)

    def _stopped_early(self) -> bool:
        return 0 < self.config.train.patience <= self.misses

    def _finish(self, started: float) -> RunResult:
        load_checkpoint(self.run_dir / "checkpoints" / "best", self.job.parallel, None, self.world)
        test = evaluate_view(self.job, "test")
        self.writer.write("test", self.step, test)
        self.writer.say(
            f"test, from the best step {self.best_step}: " + ", ".join(f"{k} {v:.4f}" for k, v in test.items() if isinstance(v, float))
        )
        seconds = time.perf_counter() - started
        result = RunResult(self.run_dir, self.step, self.epoch, self.best_step, self.best_valid, test, seconds, self.losses)
        if self.world.rank == 0:
            (self.run_dir / "result.json").write_text(json.dumps(self._summary(result), indent=1) + "\n")
        return result

    def _summary(self, result: RunResult) -> dict[str, Any]:
        plain = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
        packages = {name: version(name) for name in ("torch", "torchrec", "fbgemm-gpu", "numpy", "pyarrow")}
        return {
            **{key: {k: finite(v) for k, v in value.items()} if isinstance(value, dict) else value for key, value in plain.items()},
            "num_samples": {name: len(view) for name, view in self.job.views.items()},
            "num_cut": {name: view.num_cut for name, view in self.job.views.items()},
            "store_hash": self.job.store.content_hash,
            "world_size": self.world.size,
            "device": self.world.device.type,
            "versions": {"python": platform.python_version(), **packages},
        }


class _Clock:
    """Times the steps since the last line of metrics."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.restart()

    def restart(self) -> None:
        self.started, self.waited, self.tokens = time.perf_counter(), self.loader.wait_s, 0

    def count(self, batch: RaggedBatch) -> None:
        self.tokens += batch.num_tokens_global

    def tokens_per_s(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.tokens / max(1e-9, time.perf_counter() - self.started)

    def wait_share(self) -> float:
        return (self.loader.wait_s - self.waited) / max(1e-9, time.perf_counter() - self.started)
