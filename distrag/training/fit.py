"""One fit: a job trained step by step, evaluated every so often, its best state kept, and its last one to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from distrag.batch import RaggedBatch
from distrag.batching.loader import Loader, padding_share
from distrag.batching.sampler import TokenBudgetSampler
from distrag.checkpoint import Checkpoints, Found, load_checkpoint, step_name
from distrag.training.build import Job, count_steps
from distrag.training.held_out import Metrics, choose_metric, evaluate_view
from distrag.training.interrupt import Interrupt
from distrag.training.metrics import MetricsWriter, SampleLog, finite
from distrag.training.optim import Schedule, build_optimizer
from distrag.training.resume import build_checkpoints, describe_run, describe_tables, is_kept, limits_of
from distrag.training.step import StepResult
from distrag.training.stepper import Stepper, with_following
from distrag.training.timing import Clock, RankTimes, Tally, by_rank

LOWER_IS_BETTER = ("log_loss", "ne")
_LAST_S = 3.0
"""What a save under way is given when the run ends in an error, which other ranks wait to see."""
_HELD = ("step", "num_steps", "num_epochs", "best", "best_step", "best_epochs", "best_valid", "misses", "evaluated_at")
"""Attributes that a checkpoint holds: all of a fit that is over, but for its losses, which metrics.jsonl has."""


class Fit:
    """Trains one job; every rank runs the same steps.

    Args:
        job: everything before the first step.
        sampler: its planned epochs, from `build_sampler`.
        writer: where numbers go.
        run_dir: folder of the run; `checkpoints/step-<n>` in it is what a cut run goes on from, `best` (or `refit`) what is tested.
        refit_of: the fit that chose how many epochs this one trains, under the same schedule; None trains as long as the config says,
            evaluates on valid, keeps the best and stops early.
        samples: where the samples of each step go, if anywhere.
        seconds: tells for how long the run has lasted.
        interrupt: tells whether the run was asked to stop; None is never asked.
        checkpoints: saves them; otherwise one is made.

    Attributes:
        phase: `train`, or `refit`, which has nothing left to select on.
        step: global steps done.
        epoch: epochs done.
        num_epochs: epochs begun.
        num_steps: steps that schedule and progress go by.
        best_step: step of the best state.
        best_epochs: epochs done at that step, and the share done of one more.
        best_valid: its metrics on valid.
        losses: loss of each logged step.
    """

    def __init__(
        self,
        job: Job,
        sampler: TokenBudgetSampler,
        writer: MetricsWriter,
        run_dir: Path,
        *,
        refit_of: Fit | None = None,
        samples: SampleLog | None = None,
        seconds: Callable[[], float] = time.perf_counter,
        interrupt: Interrupt | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.job, self.config, self.world = job, job.config, job.world
        self.sampler, self.writer, self.samples, self.seconds = sampler, writer, samples, seconds
        self.interrupt, self._stopped = interrupt or Interrupt(), False
        self.selects = refit_of is None
        self.phase, self.kept = ("train", "best") if self.selects else ("refit", "refit")
        self.checkpoints = checkpoints or build_checkpoints(self.config, run_dir, self.world)
        self.before = None if refit_of is None else refit_of.held()
        self.epoch_steps = len(sampler)
        # Epochs differ by a step or two, so whole epochs are counted as such; num_steps is then what schedule and progress go by.
        if refit_of is None:
            self.total_epochs, self.max_epochs = float(self.config.train.num_epochs), self.config.train.num_epochs
            self.max_steps, self.num_steps, self._stretch = self.config.train.max_steps, count_steps(job, sampler), 1.0
            schedule_steps = self.num_steps
        else:
            self.total_epochs, self.max_epochs = refit_of.best_epochs, 0
            self._stretch = refit_of.num_steps / max(1, refit_of.best_step)
            self.max_steps = self.num_steps = max(1, round(self.total_epochs * self.epoch_steps))
            schedule_steps = round(self.total_epochs * self.epoch_steps * self._stretch)
        self.optimizer = build_optimizer(job.parallel, self.config.optim, self.config.tables)
        self.schedule = Schedule(self.optimizer, self.config.optim, schedule_steps)
        self.stepper = Stepper(job, self.optimizer, self.schedule, writer, run_dir)
        self.guard = self.stepper.guard
        self.tally = Tally()
        self.metric = choose_metric(job)
        self.step = self.epoch = self.num_epochs = self.misses = 0
        self.best_step: int = 0
        self.trained = self.num_cut = 0  # steps, and events cut, of the sampler's epoch
        self.evaluated_at = self.saved_at = -1
        self.best_epochs: float = 0.0
        self._began = 0.0  # share of the sampler's epoch that was done before a resume
        self.best: float | None = None
        self.best_valid: Metrics = {}
        self.losses: list[float] = []
        self.lines = {"train": 0, "refit": 0, "samples": 0} if refit_of is None else refit_of.lines_written()

    def run(self) -> None:
        """Trains to the last step, or until valid has not improved for `train.patience` evaluations; all of it is saved then."""
        try:
            self._run()
        except BaseException:
            self.checkpoints.abandon(_LAST_S)
            raise

    def _run(self) -> None:
        self.writer.begin(self.phase, self.num_steps, self.step)
        self.world.peers.where = f"{self.phase} step {self.step + 1}"
        if self.step and self._is_due() and self.evaluated_at != self.step:
            self._evaluate()  # the run was cut in this evaluation
        while not self._is_done():
            self._run_epoch()
        if self.saved_at != self.step:
            self._save()
        if self.selects and self.evaluated_at != self.step:
            self._evaluate()
        if not self.selects:
            self.checkpoints.keep_newest(self.kept)
        self.checkpoints.wait()
        self.stepper.watch.close()
        if self.tally.line():
            self.writer.say(self.tally.line())

    def _run_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)
        self.trained, self.num_epochs = self.sampler.start, self.epoch + 1
        self._began = self._began if self.trained else 0.0
        train = self.job.views["train"]
        self.num_cut = train.at_epoch(self.epoch).num_cut
        loader = Loader(self.job.collate, train, self.sampler, device=self.world.device, prefetch=self.job.prefetch)
        self.job.parallel.model.train()
        clock = Clock(loader, self.world.device)
        # Ids that are exchanged ahead are those of the next step: with one rank there is nobody to exchange them with.
        for batch, following in with_following(loader, ahead=self.config.train.pipeline and self.world.size > 1):
            self._run_step(batch, following, clock)
            with clock.paused():
                if self._after_step():
                    break
        if self.trained >= self.sampler.plan.num_steps:
            self.epoch += 1
            if not self.config.train.save_every:
                self._save()
            if self.selects and not self.config.train.eval_every:
                self._evaluate()

    def _run_step(self, batch: RaggedBatch, following: RaggedBatch | None, clock: Clock) -> None:
        logs = (self.step + 1) % self.config.train.log_every == 0 or self.step == 0 or self.step + 1 == self.num_steps
        self.step, self.trained = self.step + 1, batch.step + 1
        longest = int(self.sampler.lengths[self.sampler.plan.step_samples(batch.step)].max(initial=0))
        asked = self.interrupt.asked
        result = self.stepper.run(batch, self.step, logs=logs, longest=longest, waited_s=clock.waited_s, following=following, stop=asked)
        self._stopped = result.stop
        clock.count(batch)
        if self.samples is not None:
            self.samples.write(self.phase, self.step, self.epoch, [sample for sample in batch.samples.tolist() if sample >= 0])
            self.lines["samples"] += self.world.size
        if logs:
            self._log(batch, result, clock)

    def _after_step(self) -> bool:
        """Saves and evaluates where it is time to; returns whether the fit is over."""
        every = self.config.train.save_every
        if every and self.step % every == 0:
            self._save()
        if self._stopped:
            self.stop()
        self.world.peers.where = f"{self.phase} step {self.step + 1}"
        if 0 < self.max_steps <= self.step:
            return True
        if self.config.train.eval_every and self._is_due():
            self._evaluate()
        return self._gave_up()

    def stop(self, *, saves: bool = True) -> NoReturn:
        """Saves what is not saved, and ends the run on all ranks; a resume goes on from here. A collective: every rank calls it.

        Raises:
            Stopped: always.
        """
        if saves:
            self._save()
            self.checkpoints.wait()
        raise self.interrupt.leave(self.world, self.writer, self.phase, self.step, self.num_steps, self.epoch)

    def pause(self, *, saves: bool = True) -> None:
        """Ends the run where it is asked to stop, in an evaluation: a resume does that again. A collective: every rank calls it."""
        if self.interrupt.agreed(self.world):
            self.stop(saves=saves)

    def _is_due(self) -> bool:
        """Returns whether valid is to be evaluated at this step."""
        every = self.config.train.eval_every
        return self.selects and (self.step % every == 0 if every else self._is_between())

    def _is_between(self) -> bool:
        return self.trained == 0 or self.trained >= self.sampler.plan.num_steps

    def _log(self, batch: RaggedBatch, result: StepResult, clock: Clock) -> None:
        # One small exchange: everybody's loss and norms, and the times of the steps since the line before.
        device, numbers = self.world.device, self.stepper.numbers()
        own = torch.cat([result.loss_sum.double().view(1), torch.cat([numbers, self.stepper.watch.take().view(-1)]).to(device)])
        everyone = torch.stack(self.world.all_gather(own))
        loss = float(everyone[:, 0].sum()) / max(batch.global_count, 1e-12)
        if not result.skipped:
            self.losses.append(loss)
        if self.world.rank == 0:
            norms = self.stepper.tell(everyone[:, 1 : 1 + len(numbers)])
            times = RankTimes.of(everyone[:, 1 + len(numbers) :].view(self.world.size, -1, 3))
            self._write(batch, loss, result.grad_norm, norms, clock, times)
        clock.restart()

    def _write(self, batch: RaggedBatch, loss: float, grad_norm: float, norms: dict[str, float], clock: Clock, times: RankTimes) -> None:
        plan, factor = self.sampler.plan, self.stepper.factor
        lengths, costs = self.sampler.lengths[plan.step_samples(batch.step)], plan.rank_costs(batch.step)
        values: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": loss,
            "global_tokens": batch.num_tokens_global,
            "samples": len(lengths),
            "tokens_per_s": clock.tokens_per_s(),
            "imbalance": plan.imbalance(batch.step),
            "padded_batch_padding_share": padding_share(lengths),
            "num_cut": self.num_cut,
            "data_wait_share": clock.wait_share(),
            "grad_norm": grad_norm,
            "grad_norms": {room: finite(norm) for room, norm in norms.items()},
            "num_skipped": self.guard.num_skipped,
            "loss_scale": self.guard.scale,
            "lr": self.config.optim.lr * factor,
            "table_lr": self.config.optim.table_lr * factor,
            "rank_tokens": by_rank(plan.rank_tokens(batch.step)),
            "rank_cost": by_rank(costs / costs.mean() if costs.any() else np.ones_like(costs)),
            **times.line(),
        }
        self.tally.add(times, values["imbalance"])
        self.writer.write(self.phase, self.step, values)
        self.writer.show(self.step, "  ".join([f"loss {loss:.4f}  {values['tokens_per_s']:,.0f} tokens/s", times.remark()]).rstrip())

    def _evaluate(self) -> None:
        self.world.peers.where = f"evaluation after {self.phase} step {self.step}"
        valid = evaluate_view(self.job, "valid", self.pause)
        # One copy decides for all: a rank that kept a best state alone would leave the others in the save.
        valid = self.world.broadcast_object(valid)
        self.evaluated_at = self.step
        self.writer.write("valid", self.step, {"epoch": int(self._epochs_done()), **valid})
        score = valid[self.metric]
        better = score is not None and (self.best is None or (score < self.best if self.metric in LOWER_IS_BETTER else score > self.best))
        self.misses = 0 if better else self.misses + 1
        shown = "undefined" if score is None else f"{score:.4f}"
        self.writer.say(f"step {self.step}: valid {self.metric} {shown}{' (best)' if better else ''}")
        if better or not self.best_valid:
            self.best, self.best_step, self.best_epochs, self.best_valid = score, self.step, self._epochs_done(), valid
            # The best is kept from the save of its step: the best on disk is never of a step that a resume does again.
            self._save(self.kept)
        elif self.saved_at == self.step:
            self._save()

    def _save(self, kept: str = "") -> None:
        """Saves this step; where that has been done, only what was learned of it since.

        Args:
            kept: another name to keep it under.
        """
        self.world.peers.where = f"saving {self.phase} step {self.step}"
        if self.saved_at == self.step:
            self.checkpoints.update(self._state(), kept=kept)
        else:
            name = step_name(self.phase, self.step)
            self.checkpoints.save(name, self.job.parallel, self.optimizer, self._state(), kept=kept)
            self.saved_at = self.step

    def held(self) -> dict[str, Any]:
        """Returns what `hold` takes over: all of a fit that is over, JSON-able."""
        return {name: getattr(self, name) for name in _HELD}

    def hold(self, held: Mapping[str, Any]) -> None:
        """Takes over what `held` gave of another fit."""
        for name in _HELD:
            setattr(self, name, held[name])

    def lines_written(self) -> dict[str, int]:
        """Returns how many lines of each phase and of samples, all ranks, the run has behind it."""
        return {**self.lines, self.phase: len(self.losses)}

    def _state(self) -> dict[str, Any]:
        """Returns what a run goes on from, apart from tensors: small and JSON-able."""
        return {
            **describe_run(self.config, self.job.store.content_hash),
            **self.held(),
            "phase": self.phase,
            "metric": self.metric,
            "sampler": self.sampler.state_dict(self.trained),
            "epochs_done": self._epochs_done(),
            "epoch_steps": self.epoch_steps,
            "schedule_steps": self.schedule.num_steps,
            "seconds": self.seconds(),
            "world": [self.world.size, self.world.device.type],
            "tables": describe_tables(self.job.placements, self.config.tables),
            "lines": self.lines_written(),
            "before": self.before,
            "guard": self.guard.state_dict(),
        }

    def _epochs_done(self) -> float:
        """Returns the epochs done, and the share done of one more: whatever its steps were before a resume on other ranks."""
        start, end = self.sampler.start, self.sampler.plan.num_steps
        if self.trained >= end:
            return self.sampler.epoch + 1.0
        return self.sampler.epoch + self._began + (1.0 - self._began) * (self.trained - start) / (end - start)

    def resume(self, found: Found) -> None:
        """Goes on from a checkpoint that was found whole, on the same ranks bit for bit. A collective: every rank calls it."""
        state = found.state
        self.hold(state)
        self.guard.load_state_dict(state["guard"])
        self._move(state)
        same = state["world"] == [self.world.size, self.world.device.type]
        self._settle()
        load_checkpoint(found, self.job.parallel, self.optimizer, self.world, generators=same)
        self.checkpoints.newest, self.lines = found.path, dict(state["lines"])
        self.saved_at = self.step if same else -1  # on other ranks the generators saved are not ours
        if self.selects and self.best_step == self.step:
            self.checkpoints.keep_newest(self.kept)  # the run may have been cut before it was kept
        elif self.selects and self.best_valid and not is_kept(self.checkpoints.folder / self.kept, self.best_step, self.world):
            told = f"checkpoints/{self.kept} is not the whole state of step {self.best_step} any more; the next evaluation chooses anew"
            self.writer.say(told)
            self.best, self.best_step, self.best_epochs, self.best_valid = None, 0, 0.0, {}
            self.evaluated_at = -1  # at the latest the last step is evaluated, and chosen

    def _move(self, state: Mapping[str, Any]) -> None:
        """Moves the sampler to where the run was cut, and the end of the run to where it now is."""
        self.sampler.load_state_dict(state["sampler"])
        self.trained = self.sampler.start
        at_end = self.trained >= self.sampler.plan.num_steps
        self.epoch = self.sampler.epoch + int(at_end)
        self._began = state["epochs_done"] - self.sampler.epoch if self.trained and not at_end else 0.0
        self.schedule.num_steps = state["schedule_steps"]
        if (state["epoch_steps"], state["limits"]) != (self.epoch_steps, limits_of(self.config)):
            left = round((self.total_epochs - self._epochs_done()) * self.epoch_steps)
            limits = [limit for limit in (self.max_steps if self.selects else 0, self.step + left if self.total_epochs else 0) if limit > 0]
            self.num_steps = min(limits, default=self.step)
            self.schedule.num_steps = round(self.num_steps * self._stretch)
        if not self.selects:
            self.max_steps = self.num_steps

    def _settle(self) -> None:
        """Runs steps of no sample forward and back, before the state is loaded.

        DDP keeps its first buckets for two steps and deals gradients into the final ones in the third. The order in which three or more
        ranks are summed goes by the place in a bucket, so a resumed run has to find those of the run that was cut.
        """
        self.job.parallel.model.train()
        batch = self.job.collate(self.job.views["train"], np.zeros(0, np.int64)).to(self.world.device)
        for _ in range(min(2, self.step)):
            loss, _ = self.job.parallel.model(batch)
            loss.backward()
            self.optimizer.zero_grad()

    def _is_done(self) -> bool:
        return self._gave_up() or 0 < self.max_steps <= self.step or 0 < self.max_epochs <= self.epoch

    def _gave_up(self) -> bool:
        return 0 < self.config.train.patience <= self.misses
