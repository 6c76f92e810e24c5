"""One optimizer over tables and dense part, and the schedule of its rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from distrag.config import OptimConfig
from distrag.embedding.config import TablesConfig
from distrag.parallel import Parallel

_Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def build_optimizer(parallel: Parallel, optim: OptimConfig, tables: TablesConfig) -> CombinedOptimizer:
    """Returns the fused table optimizer and the dense one as one optimizer."""
    return CombinedOptimizer([("tables", parallel.model.fused_optimizer), *dense_optimizers(parallel.dense, optim, tables)])


def dense_optimizers(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, tables: TablesConfig
) -> list[tuple[str, KeyedOptimizerWrapper]]:
    """Returns the optimizers of the dense part and of replicated tables, by group.

    Matrices decay; vectors (biases, norms) and tables do not.
    """
    groups: dict[str, dict[str, nn.Parameter]] = {"replicated": {}, "dense": {}, "decayed": {}}
    for name, parameter in parameters.items():
        decays = optim.weight_decay > 0 and parameter.ndim > 1
        groups["replicated" if "tables.replicated" in name else "decayed" if decays else "dense"][name] = parameter
    make = {"replicated": _replicated(optim, tables), "dense": _dense(optim, 0.0), "decayed": _dense(optim, optim.weight_decay)}
    return [(name, KeyedOptimizerWrapper(params, make[name])) for name, params in groups.items() if params]


def _dense(optim: OptimConfig, decay: float) -> _Make:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optim.name]
    return lambda params: kind(params, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=decay, fused=True)


def _replicated(optim: OptimConfig, tables: TablesConfig) -> _Make:
    if tables.replicated_optimizer == "adam":
        return lambda params: torch.optim.Adam(params, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    if tables.replicated_optimizer == "adagrad":
        return lambda params: torch.optim.Adagrad(params, lr=optim.lr, eps=optim.eps)
    return lambda params: torch.optim.SGD(params, lr=optim.lr)


class Schedule:
    """Sets the rates of a step before its forward, so that fused tables use them without a lag.

    Args:
        optimizer: from `build_optimizer`.
        optim: warm-up and shape.
        num_steps: global steps of the whole run, where cosine ends.
    """

    def __init__(self, optimizer: CombinedOptimizer, optim: OptimConfig, num_steps: int) -> None:
        self.optim, self.num_steps = optim, num_steps
        self.groups = optimizer.param_groups
        self.rates = [float(group["lr"]) for group in self.groups]

    def factor(self, step: int) -> float:
        """Returns the share of the full rate that step `step` (0-based) uses; step 0 of a warm-up of n uses 1/n."""
        warmup = self.optim.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.optim.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, self.num_steps - warmup))
        low = self.optim.min_lr_share
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))

    def set(self, step: int) -> float:
        """Sets every rate for step `step`; returns the factor."""
        factor = self.factor(step)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return factor
