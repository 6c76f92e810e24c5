"""Softmax of the item that follows over the whole catalogue, in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from distrag.loss.checks import check_positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrag.loss.targets import NextItemTargets


@dataclass(frozen=True)
class FullSoftmaxConfig:
    """Options of the full softmax.

    Args:
        temperature: what dot products are divided by.
        chunk_logits: logits worked on at a time (8 bytes each); what the loss needs beside its gradients.
    """

    temperature: float = 1.0
    chunk_logits: int = 1 << 22


class FullSoftmax(nn.Module):
    """-log of the softmax share of the item that follows among all items; row 0, the unknown item, is no candidate.

    Reads the whole table, so it is for tables that every rank holds.
    """

    negatives: ClassVar[Literal["none", "per_position", "shared"]] = "none"
    needs_table: ClassVar[bool] = True
    task: ClassVar[Literal["next_item", "conversion"]] = "next_item"
    Config: ClassVar[type[FullSoftmaxConfig]] = FullSoftmaxConfig

    def __init__(self, config: FullSoftmaxConfig) -> None:
        super().__init__()
        check_positive(config.temperature, "loss.temperature")
        check_positive(config.chunk_logits, "loss.chunk_logits")
        self.temperature, self.chunk_logits = config.temperature, config.chunk_logits

    def forward(self, targets: NextItemTargets) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the losses and the sum of the weights of known targets, float32 `[]` each."""
        assert targets.item_vectors is not None
        weights = targets.target_weights()
        states, items = targets.states.float(), targets.item_vectors.float()
        with torch.autocast(states.device.type, enabled=False):
            total = full_softmax(states, items, targets.target_ids, weights, 1.0 / self.temperature, self.chunk_logits)
        return total, weights.sum()


class _FullSoftmax(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk: three matrix products instead of four, and no `[P, V]` is ever held."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, items: Tensor, target_ids: Tensor, weights: Tensor, scale: float, chunk_logits: int) -> Tensor:
        wants = any(ctx.needs_input_grad[:2])
        total = states.new_zeros(())
        d_states, d_items = (torch.empty_like(states), torch.zeros_like(items)) if wants else (None, None)
        size = max(1, chunk_logits // max(1, items.shape[0]))
        for at in range(0, states.shape[0], size):
            part = slice(at, at + size)
            s, w, ids = states[part] * scale, weights[part], target_ids[part, None]
            logits = s @ items.t()
            logits[:, 0] = float("-inf")
            logs = torch.log_softmax(logits, 1)
            total -= torch.where(w != 0, w * logs.gather(1, ids)[:, 0], 0.0).sum()
            if d_states is not None and d_items is not None:
                shares = logs.exp_()
                shares.scatter_add_(1, ids, shares.new_full((1, 1), -1.0).expand_as(ids))
                torch.mm(shares, items, out=d_states[part]).mul_((w * scale)[:, None])
                d_items.addmm_(shares.t(), s * w[:, None])
        ctx.save_for_backward(d_states, d_items)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_items = ctx.saved_tensors
        return d_states * grad, d_items * grad, None, None, None, None


_apply: Callable[..., Tensor] = _FullSoftmax.apply


def full_softmax(states: Tensor, items: Tensor, target_ids: Tensor, weights: Tensor, scale: float, chunk_logits: int) -> Tensor:
    """Returns sum over positions of weight * -log softmax share of the target among all items but row 0, `[]`.

    Differentiable in the first two arguments, once.

    Args:
        states: `[P, D]`.
        items: `[V, D]`.
        target_ids: int64 `[P]`; a target of 0 must have weight 0.
        weights: `[P]`.
        scale: factor of the dot products, 1 / temperature.
        chunk_logits: logits worked on at a time.
    """
    return _apply(states, items, target_ids, weights, scale, chunk_logits)
