"""One exact step: N ranks compute what one rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.optim.keyed import CombinedOptimizer

from distrag.batch import RaggedBatch
from distrag.parallel import Parallel
from distrag.problem import problem
from distrag.training.timing import StepWatch
from distrag.world import World


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, as tensors so that nothing waits for the device.

    Attributes:
        loss_sum: this rank's loss sum, float32 `[]`.
        count: what the loss counted on this rank, float32 `[]`.
        grad_norm: global norm of the dense gradient, float32 `[]`; 0 where it was not asked for.
    """

    loss_sum: torch.Tensor
    count: torch.Tensor
    grad_norm: torch.Tensor


def train_step(
    parallel: Parallel,
    optimizer: CombinedOptimizer,
    batch: RaggedBatch,
    world: World,
    *,
    clip_norm: float = 0.0,
    want_norm: bool = False,
    watch: StepWatch | None = None,
) -> StepResult:
    """Runs forward, backward and update for this rank's share of one global step.

    The loss sum is divided once by the global count and multiplied once by the world size, because DDP and TorchRec both average
    over ranks. The global count comes with the batch, from the plan: no collective is spent on it. Rates must be set before: the
    fused tables read them in `zero_grad`.

    Args:
        parallel: the sharded model.
        optimizer: from `build_optimizer`.
        batch: this rank's share, on the device.
        world: the ranks.
        clip_norm: largest norm of the dense gradient; 0 does not clip.
        want_norm: compute the norm even when it does not clip.
        watch: times the parts of the step, its `begin` already called.
    """
    optimizer.zero_grad()
    loss_sum, loss_count = parallel.model(batch)
    count = batch.global_count if batch.global_count > 0 else 1.0
    (loss_sum * (world.size / count)).backward()
    if watch is not None:
        watch.mark("backward")  # from here on no rank waits for another
    grad_norm = torch.zeros(())
    if clip_norm > 0 or want_norm:
        gradients = [p.grad for p in parallel.dense.values() if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        if clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(parallel.dense.values()), clip_norm, grad_norm)
    optimizer.step()
    return StepResult(loss_sum.detach(), loss_count.detach(), grad_norm.detach())


def check_count(batch: RaggedBatch, count: torch.Tensor, world: World) -> None:
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
