"""One process that runs real training steps on chosen samples, to be timed or weighed; what it learns is thrown away."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from distrag.batch import RaggedBatch
from distrag.problem import problem
from distrag.training.build import Job
from distrag.training.guard import Guard
from distrag.training.optim import build_optimizer
from distrag.training.step import train_step

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Trial:
    """Forward, backward and update of a job on batches that are made to order.

    The rates are 0, so that the weights stay what they are and every step costs what it would early in a run.

    Args:
        job: of a world of one rank.

    Raises:
        ValueError: there are other ranks, or the train view is empty.
    """

    def __init__(self, job: Job) -> None:
        if job.world.size > 1:
            todo = "start `distrag plan` as one plain process; --world-size says how many ranks to plan for"
            raise problem("Trial steps run in one process", got=f"{job.world.size} ranks", wanted=1, where="the launcher", todo=todo)
        self.job, self.view, self.device = job, job.views["train"], job.world.device
        self.lengths: Ints = self.view.lengths
        check_view(self.lengths)
        self._counts = job.collate.counts(self.view)
        self.optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        job.parallel.model.train()
        self._guard = Guard()

    def batch(self, samples: Ints) -> RaggedBatch:
        """Returns the batch of these samples on the device, as a step of theirs alone; of a dummy when there are none."""
        count, tokens = float(self._counts[samples].sum()), int(self.lengths[samples].sum())
        built = self.job.collate(self.view, samples, global_count=count, num_tokens_global=tokens)
        return built.to(self.device) if self.device.type == "cuda" else built

    def step(self, batch: RaggedBatch) -> None:
        """Runs one training step."""
        train_step(
            self.job.parallel,
            self.optimizer,
            batch,
            self.job.world,
            clip_norm=self.job.config.optim.clip_norm,
            guard=self._guard,
            micro_batches=self.job.config.batching.micro_batches,
        )

    def seconds(self, batch: RaggedBatch) -> float:
        """Returns how long one training step takes, the device included."""
        self._wait()
        started = time.perf_counter()
        self.step(batch)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_view(lengths: Ints) -> None:
    """Refuses a train view that a step cannot be made of.

    Raises:
        ValueError: no sample, or no position in any.
    """
    if not len(lengths) or not lengths.max():
        got = f"{len(lengths)} samples, all of length 0" if len(lengths) else "0 samples"
        todo = "prepare a store with histories, or change data.split"
        raise problem("No sample to try a step on", got=got, wanted="a history of at least 1 event", where="the train view", todo=todo)


def take_samples(lengths: Ints, order: Ints, max_tokens: int, max_samples: int) -> Ints:
    """Returns the samples that fill a rank in this order: as many as come first, then whatever of the rest still fits.

    Args:
        lengths: of all samples, `[N]`.
        order: sample numbers, those to take first in front.
        max_tokens: most positions together.
        max_samples: most samples together.
    """
    taken: list[Ints] = []
    for _ in range(16):  # each round takes a run of samples, and what is left out leaves less and less room
        sizes = lengths[order]
        stop = int(np.searchsorted(np.cumsum(sizes), max_tokens, side="right"))
        head = order[: min(stop, max_samples)]
        taken.append(head)
        max_tokens, max_samples = max_tokens - int(lengths[head].sum()), max_samples - len(head)
        rest = order[len(head) :]
        order = rest[lengths[rest] <= max_tokens]
        if not len(order) or max_samples <= 0:
            break
    return np.concatenate(taken)
