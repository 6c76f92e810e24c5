"""The sizes that both sides of the bench share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What the model looks like, on both sides.

    Args:
        dim: width of every vector (`D`).
        max_len: longest history.
        num_layers: layers of gru and self_attention.
        num_heads: heads of self_attention.
        dropout: share that self_attention drops; 0 keeps torch's slow generator on the CPU out of the padded side's time.
        activation: of the feed-forward layers of self_attention: relu or gelu.
    """

    dim: int = 64
    max_len: int = 200
    num_layers: int = 1
    num_heads: int = 2
    dropout: float = 0.0
    activation: str = "relu"
