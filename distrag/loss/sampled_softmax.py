"""Softmax of the item that follows against items drawn once for the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distrag.loss.checks import check_positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrag.loss.targets import NextItemTargets

_CHUNK = 1 << 17  # logits worked on at a time: half a MiB of float32 stays in a core's cache


@dataclass(frozen=True)
class SampledSoftmaxConfig:
    """Options of the sampled softmax.

    Args:
        num_negatives: items drawn uniformly, once per batch, shared by all positions.
        temperature: what dot products are divided by; about 0.05 to 0.1 with normalize.
        normalize: whether states and items are scaled to length 1, so that the score is their cosine.
    """

    num_negatives: int = 256
    temperature: float = 1.0
    normalize: bool = False


class SampledSoftmax(nn.Module):
    """-log of the softmax share of the item that follows among itself and the shared negatives.

    A negative that is the target of a position is no candidate there. Uniform draws need no correction of the logits: it would be the same
    number for all.

    Source: Jean et al., "On using very large target vocabulary for neural machine translation", ACL 2015; "eSASRec", RecSys 2025 (the
    setting).
    """

    negatives: ClassVar[Literal["none", "per_position", "shared"]] = "shared"
    needs_table: ClassVar[bool] = False
    task: ClassVar[Literal["next_item", "conversion"]] = "next_item"
    Config: ClassVar[type[SampledSoftmaxConfig]] = SampledSoftmaxConfig

    def __init__(self, config: SampledSoftmaxConfig) -> None:
        super().__init__()
        check_positive(config.num_negatives, "loss.num_negatives")
        check_positive(config.temperature, "loss.temperature")
        self.num_negatives, self.temperature, self.normalize = config.num_negatives, config.temperature, config.normalize

    def forward(self, targets: NextItemTargets) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the losses and the sum of the weights of known targets, float32 `[]` each."""
        vectors, negative_vectors, negative_ids = targets.target_vectors, targets.negative_vectors, targets.negative_ids
        assert vectors is not None
        assert negative_vectors is not None
        assert negative_ids is not None
        weights = targets.target_weights()
        states, vectors, drawn = (self._scaled(t.float()) for t in (targets.states, vectors, negative_vectors))
        with torch.autocast(states.device.type, enabled=False):
            total = sampled_softmax(states, vectors, drawn, targets.target_ids, negative_ids, weights, 1.0 / self.temperature)
        return total, weights.sum()

    def _scaled(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1) if self.normalize else vectors


def _leave_out_targets(logits: Tensor, target_ids: Tensor, negative_ids: Tensor, ordered: Tensor) -> None:
    """Sets to -inf the logits of negatives that are the position's own target; `ordered` are the sorted negatives."""
    if not logits.is_cuda:  # few rows are hit, and comparing all pairs costs as much as the product; on CUDA asking which ones would wait
        place = torch.searchsorted(ordered, target_ids).clamp_max_(ordered.shape[0] - 1)
        rows = (ordered[place] == target_ids).nonzero()[:, 0]
        logits[rows] = logits[rows].masked_fill_(target_ids[rows, None] == negative_ids, float("-inf"))
    else:
        logits.masked_fill_(target_ids[:, None] == negative_ids, float("-inf"))


class _SampledSoftmax(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk: the logits `[P, N]` exist once, in cache, and never as a whole.

    The positive is the last column. Weights multiply `[P, D]`, not the four times larger `[P, N]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        positives: Tensor,
        negatives: Tensor,
        target_ids: Tensor,
        negative_ids: Tensor,
        weights: Tensor,
        scale: float,
    ) -> Tensor:
        wants = any(ctx.needs_input_grad[:3])
        total, N = states.new_zeros(()), negatives.shape[0]
        d_states, d_positives = (torch.empty_like(t) if wants else None for t in (states, positives))
        d_negatives = torch.zeros_like(negatives) if wants else None
        ordered = negative_ids.sort().values
        size = max(1, _CHUNK // (N + 1))
        for at in range(0, states.shape[0], size):
            part = slice(at, at + size)
            s, y, w = states[part] * scale, positives[part], weights[part]
            logits = s.new_empty(s.shape[0], N + 1)
            torch.mm(s, negatives.t(), out=logits[:, :N])
            if N:
                _leave_out_targets(logits[:, :N], target_ids[part], negative_ids, ordered)
            logits[:, N] = torch.linalg.vecdot(s, y)
            logs = torch.log_softmax(logits, 1)
            total -= torch.dot(w, logs[:, N])
            if d_states is not None and d_positives is not None and d_negatives is not None:
                shares = logs.exp_()
                pull = (shares[:, N] - 1)[:, None]
                s *= w[:, None]
                torch.mm(shares[:, :N], negatives, out=d_states[part]).addcmul_(pull, y).mul_((w * scale)[:, None])
                torch.mul(pull, s, out=d_positives[part])
                d_negatives.addmm_(shares[:, :N].t(), s)
        ctx.save_for_backward(d_states, d_positives, d_negatives)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_positives, d_negatives = ctx.saved_tensors
        return d_states * grad, d_positives * grad, d_negatives * grad, None, None, None, None


_apply: Callable[..., Tensor] = _SampledSoftmax.apply


def sampled_softmax(
    states: Tensor, positives: Tensor, negatives: Tensor, target_ids: Tensor, negative_ids: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """Returns sum over positions of weight * -log softmax share of the positive, `[]`.

    Differentiable in the first three arguments, once.

    Args:
        states: `[P, D]`.
        positives: `[P, D]`.
        negatives: `[N, D]`.
        target_ids: int64 `[P]`.
        negative_ids: int64 `[N]`.
        weights: `[P]`, 0 where nothing is to be learnt.
        scale: factor of the dot products, 1 / temperature.
    """
    return _apply(states, positives, negatives, target_ids, negative_ids, weights, scale)
