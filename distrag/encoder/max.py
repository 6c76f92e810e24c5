"""Max pooling: the state of a position is the maximum of its history so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from distrag import ragged
from distrag.encoder.prefix import prefix_max


@dataclass(frozen=True)
class MaxConfig:
    """Nothing to set: the maximum has no parameters."""


class Max(nn.Module):
    """The maximum of the vectors up to each position; causal, without parameters, linear in the length."""

    causal: ClassVar[bool] = True
    Config: ClassVar[type[MaxConfig]] = MaxConfig

    def __init__(self, config: MaxConfig, dim: int, max_len: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the maximum up to each position, `[sum_L, D]`.

        Args:
            x: vectors `[sum_L, D]`.
            offsets: int64 `[B+1]`.
            keys: not used, there is no dropout here.
        """
        return prefix_max(x, offsets)

    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the maximum of each history, zeros for an empty one, `[B, D]`, without computing the states."""
        return ragged.segment_max(x, offsets)

    @staticmethod
    def cost(config: MaxConfig, dim: int) -> tuple[float, float, float]:
        """Returns (a, b, c) of the cost a*L + b*L^2 + c of a sequence of length L."""
        return 1.0, 0.0, 0.0
