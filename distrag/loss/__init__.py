"""Losses turn states or logits into `(sum, count)`, float32; whoever steps divides once by the count over all ranks.

`LOSSES` names them. A target that weighs nothing changes neither number, and a batch without targets gives (0, 0), not NaN.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

from distrag.loss.bce import BCE, BCEConfig
from distrag.loss.binary import Binary, BinaryConfig
from distrag.loss.full_softmax import FullSoftmax, FullSoftmaxConfig
from distrag.loss.sampled_softmax import SampledSoftmax, SampledSoftmaxConfig
from distrag.loss.targets import ConversionTargets, NextItemTargets


class Loss(Protocol):
    """What a class needs to stand in LOSSES; no loss derives from it."""

    negatives: ClassVar[Literal["none", "per_position", "shared"]]
    needs_table: ClassVar[bool]
    task: ClassVar[Literal["next_item", "conversion"]]
    Config: ClassVar[Any]

    def __init__(self, config: Any) -> None: ...


LOSSES: dict[str, type[Loss]] = {
    "bce": BCE,
    "sampled_softmax": SampledSoftmax,
    "full_softmax": FullSoftmax,
    "binary": Binary,
}

__all__ = [
    "BCE",
    "LOSSES",
    "BCEConfig",
    "Binary",
    "BinaryConfig",
    "ConversionTargets",
    "FullSoftmax",
    "FullSoftmaxConfig",
    "Loss",
    "NextItemTargets",
    "SampledSoftmax",
    "SampledSoftmaxConfig",
]
