"""Encoders turn vectors into vectors: one state per position, or one vector per history.

`ENCODERS` names them. Every encoder gives a sequence the same result alone, in any batch, or padded; an empty history gives zeros.
"""

from __future__ import annotations

from distrag.encoder.gru import GRU, GRUConfig
from distrag.encoder.max import Max, MaxConfig
from distrag.encoder.mean import Mean, MeanConfig
from distrag.encoder.sasrec import SASRec, SASRecConfig
from distrag.encoder.self_attention import SelfAttention, SelfAttentionConfig
from distrag.encoder.sum import Sum, SumConfig

Encoder = Mean | Max | Sum | GRU | SelfAttention | SASRec
EncoderConfig = MeanConfig | MaxConfig | SumConfig | GRUConfig | SelfAttentionConfig | SASRecConfig

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
    "EncoderConfig",
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
