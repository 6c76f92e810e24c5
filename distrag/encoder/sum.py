"""Sum pooling: the state of a position is the sum of its history so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from distrag import ragged
from distrag.encoder.prefix import prefix_sum


@dataclass(frozen=True)
class SumConfig:
    """Nothing to set: the sum has no parameters."""


class Sum(nn.Module):
    """The sum of the vectors up to each position; causal, without parameters, linear in the length."""

    causal: ClassVar[bool] = True
    Config: ClassVar[type[SumConfig]] = SumConfig

    def __init__(self, config: SumConfig, dim: int, max_len: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the sum up to each position, `[sum_L, D]`.

        Args:
            x: vectors `[sum_L, D]`.
            offsets: int64 `[B+1]`.
            keys: not used, there is no dropout here.
        """
        return prefix_sum(x, offsets)

    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the sum of each history, zeros for an empty one, `[B, D]`, without computing the states."""
        return ragged.segment_sum(x, offsets)

    @staticmethod
    def cost(config: SumConfig, dim: int) -> tuple[float, float, float]:
        """Returns (a, b, c) of the cost a*L + b*L^2 + c of a sequence of length L."""
        return 1.0, 0.0, 0.0
