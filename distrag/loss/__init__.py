"""Losses turn states or logits into `(sum, count)`, float32; whoever steps divides once by the count over all ranks.

`LOSSES` names them. A target that weighs nothing changes neither number, and a batch without targets gives (0, 0), not NaN.
"""

from __future__ import annotations

from distrag.loss.bce import BCE, BCEConfig
from distrag.loss.binary import Binary, BinaryConfig
from distrag.loss.full_softmax import FullSoftmax, FullSoftmaxConfig
from distrag.loss.sampled_softmax import SampledSoftmax, SampledSoftmaxConfig
from distrag.loss.targets import ConversionTargets, NextItemTargets

Loss = BCE | SampledSoftmax | FullSoftmax | Binary
LossConfig = BCEConfig | SampledSoftmaxConfig | FullSoftmaxConfig | BinaryConfig

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
    "LossConfig",
    "NextItemTargets",
    "SampledSoftmax",
    "SampledSoftmaxConfig",
]
