"""Binary cross-entropy of the item that follows against items drawn for each position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distrag.loss.checks import check_positive

if TYPE_CHECKING:
    from distrag.loss.targets import NextItemTargets


@dataclass(frozen=True)
class BCEConfig:
    """Options of the binary cross-entropy with negatives.

    Args:
        num_negatives: items drawn for each position.
    """

    num_negatives: int = 1


class BCE(nn.Module):
    """-log s(y) - sum over negatives of log(1 - s(n)), s the logistic function of the dot product with the state.

    A negative that happens to be the target is left out.

    Source: Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018, eq. 6; several negatives as in Petrov and Macdonald,
    "gSASRec", RecSys 2023.
    """

    negatives: ClassVar[Literal["none", "per_position", "shared"]] = "per_position"
    needs_table: ClassVar[bool] = False
    task: ClassVar[Literal["next_item", "conversion"]] = "next_item"
    Config: ClassVar[type[BCEConfig]] = BCEConfig

    def __init__(self, config: BCEConfig) -> None:
        super().__init__()
        check_positive(config.num_negatives, "loss.num_negatives")
        self.num_negatives = config.num_negatives

    def forward(self, targets: NextItemTargets) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the losses and the sum of the weights of known targets, float32 `[]` each."""
        vectors, negative_vectors, negative_ids = targets.target_vectors, targets.negative_vectors, targets.negative_ids
        assert vectors is not None
        assert negative_vectors is not None
        assert negative_ids is not None
        weights = targets.target_weights()
        states = targets.states.float()
        with torch.autocast(states.device.type, enabled=False):
            positive = torch.linalg.vecdot(states, vectors.float())
            negative = torch.linalg.vecdot(states[:, None], negative_vectors.float())
        drawn = (negative_ids != targets.target_ids[:, None]).float()
        losses = F.softplus(-positive) + (F.softplus(negative) * drawn).sum(1)
        return (losses * weights).sum(), weights.sum()
