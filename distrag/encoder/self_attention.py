"""Transformer blocks in which every event of a history sees every other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from distrag import ragged
from distrag.encoder.attention import Transformer, transformer_cost


@dataclass(frozen=True)
class SelfAttentionConfig:
    """Options of the bidirectional transformer.

    Args:
        num_layers: transformer blocks.
        num_heads: attention heads; must divide model.dim.
        dropout: share of values dropped after the input, each attention, and in and after each feed-forward layer while training.
        ffn_factor: width of the feed-forward layer, in units of model.dim.
        activation: of the feed-forward layer (gelu, swiglu or relu). At relu's kink a difference of rounding becomes a finite one, so with
            relu a long loss curve can come to depend on the number of ranks.
    """

    num_layers: int = 1
    num_heads: int = 2
    dropout: float = 0.1
    ffn_factor: float = 4.0
    activation: str = "gelu"


class SelfAttention(nn.Module):
    """States that see the whole history; not causal, so for labels of the whole history only.

    Positions are counted from the newest event of each sequence (0 is the newest).

    Source: Vaswani et al., "Attention is all you need", 2017.
    """

    causal: ClassVar[bool] = False
    Config: ClassVar[type[SelfAttentionConfig]] = SelfAttentionConfig

    def __init__(self, config: SelfAttentionConfig, dim: int, max_len: int) -> None:
        super().__init__()
        self.transformer = Transformer(config, dim, max_len, causal=False)

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns one state per position, `[sum_L, D]`.

        Args:
            x: vectors `[sum_L, D]`.
            offsets: int64 `[B+1]`.
            keys: int64 `[sum_L]`, dropout keys; None in training takes torch's generator.
        """
        return self.transformer(x, offsets, keys)  # type: ignore[no-any-return]

    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the mean state of each history, zeros for an empty one, `[B, D]`."""
        return ragged.segment_mean(self(x, offsets, keys), offsets)

    @staticmethod
    def cost(config: SelfAttentionConfig, dim: int) -> tuple[float, float, float]:
        """Returns (a, b, c) of the cost a*L + b*L^2 + c of a sequence of length L."""
        return transformer_cost(config, dim, causal=False)
