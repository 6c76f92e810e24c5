"""One exact step: N ranks compute what one rank computes, and change nothing where a number of any of them is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer

from distrag.batch import RaggedBatch
from distrag.embedding.boundary import BAD, SQUARES, STOP, Boundary, never
from distrag.model import SequenceModel
from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.training.guard import Guard
from distrag.training.timing import StepWatch
from distrag.world import World


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind; tensors wait for no device.

    Attributes:
        loss_sum: this rank's loss sum, float32 `[]`.
        count: what the loss counted on this rank, float32 `[]`.
        grad_norm: global norm of the dense gradient before clipping, the same on all ranks; 0 without a guard.
        vector_norm: norm of the gradients of all looked-up vectors of sharded tables, over all ranks; negatives that a step shares count
            once for each rank and part. 0 without a guard.
        skipped: a number was not finite on some rank: nothing was updated, on any.
        stop: some rank was asked to stop.
    """

    loss_sum: Tensor
    count: Tensor
    grad_norm: float
    vector_norm: float = 0.0
    skipped: bool = False
    stop: bool = False


def train_step(
    parallel: Parallel,
    optimizer: CombinedOptimizer,
    batch: RaggedBatch,
    world: World,
    *,
    clip_norm: float = 0.0,
    watch: StepWatch | None = None,
    guard: Guard | None = None,
    stop: Callable[[], bool] = never,
    following: RaggedBatch | None = None,
    micro_batches: int = 1,
    inspect: Callable[[float, float], None] | None = None,
) -> StepResult:
    """Runs forward, backward and update for this rank's share of one global step.

    The loss sum is divided once by the global count, which comes with the batch from the plan, and multiplied once by the world size:
    DDP and TorchRec both average over ranks. Rates must be set before: fused tables read them in `zero_grad`. With a guard the backward
    stops in front of the sharded tables until every rank knows whether any found a bad number; then all update, or none.

    Args:
        parallel: the sharded model.
        optimizer: from `build_optimizer`.
        batch: this rank's share, on the device.
        world: the ranks.
        clip_norm: largest norm of the dense gradient; 0 does not clip. Gradients of sharded tables are not clipped.
        watch: times the parts of the step, its `begin` already called.
        guard: scales the loss, and lets only finite steps through; None updates whatever comes.
        stop: tells whether this rank was asked to stop; asked in the backward.
        following: the batch of the next step; its ids are exchanged while this one computes.
        micro_batches: parts that encoder, head and loss see one after the other; lookups and update are of the whole share.
        inspect: called with the norms of dense part and vectors before gradients are clipped and used; those of the vectors are still
            multiplied by scale and world size.
    """
    boundary = _begin(parallel, optimizer, guard, stop)
    scale = guard.scale if guard is not None else 1.0
    factor = scale * world.size / (batch.global_count if batch.global_count > 0 else 1.0)
    loss_sum, count = run_parts(parallel, batch, factor, following, micro_batches)
    gradients = [p.grad for p in parallel.dense.values() if p.grad is not None]
    norm = torch.zeros(())
    if guard is not None or clip_norm > 0:
        norm = total_norm(gradients)
    bad, stopped, squares, dense = _read(boundary.flags, norm) if guard is not None else (0.0, 0.0, 0.0, 0.0)
    if guard is not None and not guard.admit(finite=bad == 0 and math.isfinite(dense)):
        boundary.drop()
        return StepResult(loss_sum, count, dense / scale, skipped=True, stop=stopped > 0)
    if scale != 1.0 and gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)
    # The mean over ranks of their squares; each is of a loss that was multiplied by the world size.
    vector_norm = math.sqrt(squares / world.size) / scale
    if inspect is not None:
        inspect(dense / scale, vector_norm)
    boundary.release(1.0 / scale)
    if watch is not None:
        watch.mark("backward")  # from here on no rank waits for another
    if clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(list(parallel.dense.values()), clip_norm, norm / scale)
    optimizer.step()
    return StepResult(loss_sum, count, dense / scale, vector_norm, stop=stopped > 0)


def _begin(parallel: Parallel, optimizer: CombinedOptimizer, guard: Guard | None, stop: Callable[[], bool]) -> Boundary:
    boundary = parallel.plain.tables.boundary
    boundary.now.holds, boundary.now.stop = guard is not None, stop
    optimizer.zero_grad()
    boundary.flags.grad = None
    if guard is not None:
        parallel.set_updates(guard.num_updates)
    return boundary


def run_parts(
    parallel: Parallel, batch: RaggedBatch, factor: float, following: RaggedBatch | None, micro_batches: int
) -> tuple[Tensor, Tensor]:
    """Runs forward and backward, part by part; returns loss sum and count of the whole. A collective.

    Args:
        parallel: the sharded model.
        batch: this rank's share of the step.
        factor: what the loss sum is multiplied by.
        following: the batch of the next step, or None.
        micro_batches: at most so many parts.
    """
    tables = parallel.plain.tables
    parts = cut_batch(parallel, batch, micro_batches)
    # By the config and not by the parts this rank has: DDP's forward may exchange something, and all must come in one order.
    found = tables.boundary.cut(tables.look_up(batch.ids)) if micro_batches > 1 else None
    total, counts = torch.zeros((), device=batch.weights.device), torch.zeros((), device=batch.weights.device)
    for number, (part, where) in enumerate(parts):
        last = number == len(parts) - 1
        pieces = None if found is None else {key: vectors[where.get(key, slice(None))] for key, vectors in found.items()}
        with nullcontext() if last else parallel.no_sync():
            loss, count = parallel.model(part, pieces)
            if last and following is not None:
                tables.begin(following.ids)
            (loss * factor).backward()
        total, counts = total + loss.detach(), counts + count.detach()
    if following is not None:
        tables.go_on()
    return total, counts


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the norm of all of them together, float32 `[]`; torch's `get_total_norm` sorts them by device first."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def cut_batch(parallel: Parallel, batch: RaggedBatch, num_parts: int) -> list[tuple[RaggedBatch, dict[str, slice]]]:
    """Returns a batch in at most `num_parts` parts of neighbouring samples, each of about as many tokens."""
    num_parts = min(num_parts, batch.num_samples)
    if num_parts <= 1:
        return [(batch, {})]
    weights = batch.lengths + 1  # samples without history are shared out too
    ends = weights.cumsum(0)
    shares = torch.arange(1, num_parts, device=ends.device) * ends[-1] / num_parts
    bounds = [0, *torch.searchsorted(ends, shares).add(1).tolist(), batch.num_samples]
    bounds = sorted({min(bound, batch.num_samples) for bound in bounds})
    return [(part.batch, part.where) for part in batch.cut(bounds, shared_key(parallel.plain))]


def shared_key(model: SequenceModel) -> str:
    """Returns the key of the negatives that a step shares, and every rank looks up; '' where there are none."""
    return f"{model.inputs.target}:negative" if model.loss.negatives == "shared" else ""


def _read(flags: Tensor, norm: Tensor) -> list[float]:
    """Returns bad, stop, squared norm of the vectors, and norm of the dense part: one transfer from the device."""
    if flags.grad is None:
        return [0.0, 0.0, 0.0, float(norm)]
    report = torch.cat([flags.grad, norm.to(flags.grad).view(1)]).tolist()
    return [report[BAD], report[STOP], report[SQUARES], report[3]]


def check_count(batch: RaggedBatch, count: Tensor, world: World) -> None:
    """Verifies in debug mode that the losses' counts sum to what the plan promised.

    Args:
        batch: this rank's share.
        count: what the loss counted on this rank, float32 `[]`.
        world: the ranks.

    Raises:
        ValueError: the plan and the loss disagree.
    """
    total = float(world.all_reduce_sum(count.detach().clone().double()))
    if abs(total - batch.global_count) > 1e-4 * max(1.0, abs(batch.global_count)):
        where = f"epoch {batch.epoch}, step {batch.step}"
        todo = "make the loss count exactly the targets it weighs: unknown targets (row 0) and dummies weigh nothing"
        raise problem("The loss counts other targets than the plan", got=total, wanted=batch.global_count, where=where, todo=todo)
