"""SASRec: transformer blocks in which an event sees itself and older ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from distrag import ragged
from distrag.encoder.attention import Transformer, transformer_cost


@dataclass(frozen=True)
class SASRecConfig:
    """Options of the causal transformer.

    Args:
        num_layers: transformer blocks.
        num_heads: attention heads; must divide model.dim.
        dropout: share of values dropped after the input, each attention, and in and after each feed-forward layer while training.
        ffn_factor: width of the feed-forward layer, in units of model.dim; 1 in the original, 4 in most later work.
        activation: of the feed-forward layer (gelu, swiglu, or the original's relu). At relu's kink a difference of rounding becomes a
            finite one, so with relu a long loss curve can come to depend on the number of ranks.
    """

    num_layers: int = 2
    num_heads: int = 1
    dropout: float = 0.2
    ffn_factor: float = 1.0
    activation: str = "gelu"


class SASRec(nn.Module):
    """States that see their past; causal, so every position predicts the next event.

    Positions are counted from the newest event of each sequence (0 is the newest), as in the original's left-padded rectangle.
    The blocks norm first and end in a layer norm.

    Source: Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018; the swiglu option as in "eSASRec", RecSys 2025.
    """

    causal: ClassVar[bool] = True
    Config: ClassVar[type[SASRecConfig]] = SASRecConfig

    def __init__(self, config: SASRecConfig, dim: int, max_len: int) -> None:
        super().__init__()
        self.transformer = Transformer(config, dim, max_len, causal=True)

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns one state per position, `[sum_L, D]`.

        Args:
            x: vectors `[sum_L, D]`.
            offsets: int64 `[B+1]`.
            keys: int64 `[sum_L]`, dropout keys; None in training takes torch's generator.
        """
        return self.transformer(x, offsets, keys)  # type: ignore[no-any-return]

    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the state of the newest position of each history, zeros for an empty one, `[B, D]`."""
        return ragged.last(self(x, offsets, keys), offsets)

    @staticmethod
    def cost(config: SASRecConfig, dim: int) -> tuple[float, float, float]:
        """Returns (a, b, c) of the cost a*L + b*L^2 + c of a sequence of length L."""
        return transformer_cost(config, dim, causal=True)
