"""What a loss is given: everything it needs and nothing it would have to look up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NextItemTargets:
    """States and the item that follows each of them (P positions of all sequences of the local batch).

    Attributes:
        states: float `[P, D]`.
        target_ids: int64 `[P]`, the row of the item that follows; 0 (unknown, or nothing follows) weighs nothing.
        weights: float32 `[P]`.
        target_vectors: `[P, D]`; None for a loss that reads the whole table.
        negative_ids: int64 `[N]` shared or `[P, N]` per position; None for a loss without negatives.
        negative_vectors: `[N, D]` or `[P, N, D]`.
        item_vectors: `[V, D]`, the whole table; row 0 is the unknown item. None for a loss with negatives.
    """

    states: Tensor
    target_ids: Tensor
    weights: Tensor
    target_vectors: Tensor | None = None
    negative_ids: Tensor | None = None
    negative_vectors: Tensor | None = None
    item_vectors: Tensor | None = None

    def target_weights(self) -> Tensor:
        """Returns the weight of each target, 0 where no known item follows: float32 `[P]`."""
        return self.weights.float() * (self.target_ids != 0)


@dataclass(frozen=True)
class ConversionTargets:
    """One logit and one label per sample.

    Attributes:
        logits: float `[B]` or `[B, 1]`.
        labels: `[B]` or `[B, 1]`, bool, integer or float, in [0, 1].
        weights: float32 `[B]`; 0 for a dummy sample.
    """

    logits: Tensor
    labels: Tensor
    weights: Tensor
