"""Encoders that break their contract, each in a way that makes a result depend on the number of ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from distrag.encoder.mean import Mean


class Leaks(Mean):
    """Its states hold a little of the other sequences of the batch."""

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        return super().forward(x, offsets, keys) + 0.01 * x.mean(0)


class KnowsItsRank(Mean):
    """Every rank computes something else."""

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        return super().forward(x, offsets, keys) * (1.0 + 0.01 * dist.get_rank())


class Draws(Mean):
    """Draws at random, the same on every rank: not by sample."""

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        return super().forward(x, offsets, keys) * (1.0 + 0.01 * x.new_empty(x.shape).uniform_())


class Fails(Mean):
    """Fails on the last of two ranks."""

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("bad row 17")
        return super().forward(x, offsets, keys)
