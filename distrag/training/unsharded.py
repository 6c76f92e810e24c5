"""The same model without distrag's way of spreading it: one process, ordinary modules and optimizers, no exchange, no fused update."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distrag.batch import RaggedBatch
from distrag.batching.loader import Loader
from distrag.batching.sampler import TokenBudgetSampler
from distrag.config import RunConfig
from distrag.training.build import Plain
from distrag.training.optim import Schedule, dense_optimizers


def train_unsharded(config: RunConfig, plain: Plain, device: torch.device) -> list[float]:
    """Trains a plain model for `train.max_steps` on one process and returns the loss of each step.

    Its tables are parameters whose gradients autograd sums; the loss is divided by the count of the step and by nothing else.

    Args:
        config: the run, with a global token budget and a cost.
        plain: from `build_plain`; its model is trained in place.
        device: where to compute.
    """
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of TorchRec's own use of it
    model = plain.model.to(device).train()
    optimizer = _build_optimizer(model, config)
    schedule = Schedule(optimizer, config.optim, config.train.max_steps)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.sharded.")]
    losses: list[float] = []
    for step, batch in enumerate(_batches(config, plain, device)):
        schedule.set(step)
        optimizer.zero_grad()
        total, _ = model(batch)
        loss = total / (batch.global_count if batch.global_count > 0 else 1.0)
        loss.backward()
        if config.optim.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(dense, config.optim.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _build_optimizer(model: nn.Module, config: RunConfig) -> CombinedOptimizer:
    fused = {name: p for name, p in model.named_parameters() if name.startswith("tables.sharded.")}
    dense = {name: p for name, p in model.named_parameters() if name not in fused}
    rest = dense_optimizers(dense, config.optim, config.tables)
    if not fused:
        return CombinedOptimizer(rest)
    return CombinedOptimizer([("tables", KeyedOptimizerWrapper(fused, lambda params: _of_tables(params, config))), *rest])


def _of_tables(parameters: list[torch.Tensor], config: RunConfig) -> torch.optim.Optimizer:
    """Returns the ordinary twin of the optimizer that is fused into the lookups of sharded tables."""
    lr, eps = config.optim.table_lr, config.tables.eps
    if config.tables.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    kind = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad, "adam": torch.optim.Adam}[config.tables.optimizer]
    return kind(parameters, lr=lr, eps=eps)  # type: ignore[no-any-return]


def _batches(config: RunConfig, plain: Plain, device: torch.device) -> Iterator[RaggedBatch]:
    """Yields the batches of `train.max_steps` global steps, each whole."""
    batching, view, left = config.batching, plain.views["train"], config.train.max_steps
    assert batching.global_tokens is not None
    assert batching.cost is not None
    sampler = TokenBudgetSampler(
        view,
        global_tokens=batching.global_tokens,
        num_replicas=1,
        rank=0,
        seed=config.train.seed,
        bucket_steps=batching.bucket_steps,
        cost=batching.cost,
    )
    epoch = 0
    while left > 0:
        sampler.set_epoch(epoch)
        for batch, _ in zip(Loader(plain.collate, view, sampler, device=device, prefetch=0), range(left), strict=False):
            yield batch
            left -= 1
        epoch += 1
