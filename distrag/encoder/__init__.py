"""Encoders turn vectors into vectors: one state per position, or one vector per history.

`ENCODERS` names them. Every encoder gives a sequence the same result alone, in any batch, or padded; an empty history gives zeros.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from distrag.encoder.gru import GRU, GRUConfig
from distrag.encoder.max import Max, MaxConfig
from distrag.encoder.mean import Mean, MeanConfig
from distrag.encoder.sasrec import SASRec, SASRecConfig
from distrag.encoder.self_attention import SelfAttention, SelfAttentionConfig
from distrag.encoder.sum import Sum, SumConfig


class Encoder(Protocol):
    """What a class needs to stand in ENCODERS; no encoder derives from it."""

    causal: ClassVar[bool]
    Config: ClassVar[Any]

    def __init__(self, config: Any, dim: int, max_len: int) -> None: ...
    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor: ...  # noqa: D102
    @staticmethod
    def cost(config: Any, dim: int) -> tuple[float, float, float]: ...  # noqa: D102


ENCODERS: dict[str, type[Encoder]] = {
    "mean": Mean,
    "max": Max,
    "sum": Sum,
    "gru": GRU,
    "self_attention": SelfAttention,
    "sasrec": SASRec,
}

__all__ = [
    "ENCODERS",
    "GRU",
    "Encoder",
    "GRUConfig",
    "Max",
    "MaxConfig",
    "Mean",
    "MeanConfig",
    "SASRec",
    "SASRecConfig",
    "SelfAttention",
    "SelfAttentionConfig",
    "Sum",
    "SumConfig",
]
