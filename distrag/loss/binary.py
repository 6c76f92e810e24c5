"""Cross-entropy of a yes-or-no label per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from distrag.problem import problem

if TYPE_CHECKING:
    from distrag.loss.targets import ConversionTargets


@dataclass(frozen=True)
class BinaryConfig:
    """Nothing to set: the label and its weight say it all."""


class Binary(nn.Module):
    """Weighted binary cross-entropy with logits."""

    negatives: ClassVar[Literal["none", "per_position", "shared"]] = "none"
    needs_table: ClassVar[bool] = False
    task: ClassVar[Literal["next_item", "conversion"]] = "conversion"
    Config: ClassVar[type[BinaryConfig]] = BinaryConfig

    def __init__(self, config: BinaryConfig) -> None:
        super().__init__()

    def forward(self, targets: ConversionTargets) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the losses and the sum of the weights, float32 `[]` each.

        Raises:
            ValueError: when logits, labels and weights are not one number per sample.
        """
        logits, labels, weights = (_per_sample(t, name).float() for t, name in _named(targets))
        if not len(logits) == len(labels) == len(weights):
            raise problem(
                "Logits, labels and weights differ in number",
                got=f"{len(logits)}, {len(labels)}, {len(weights)}",
                wanted="one of each per sample",
                where="ConversionTargets",
                todo="give the loss the labels and weights of the batch the logits came from",
            )
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * weights).sum(), weights.sum()


def _named(targets: ConversionTargets) -> list[tuple[Tensor, str]]:
    return [(targets.logits, "logits"), (targets.labels, "labels"), (targets.weights, "weights")]


def _per_sample(values: Tensor, name: str) -> Tensor:
    """Drops a second dimension of size 1: subtracting `[B]` from `[B, 1]` would broadcast to `[B, B]`."""
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dim() != 1:
        raise problem(
            "Not one number per sample",
            got=f"shape {list(values.shape)}",
            wanted="[B] or [B, 1]",
            where=f"ConversionTargets.{name}",
            todo="give one number per sample",
        )
    return values
