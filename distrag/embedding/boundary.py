"""Between the sharded tables and the rest of the model: where gradients wait until every rank knows that they are sound.

A sharded table is updated inside the backward of its lookup, before anything could skip the step. The boundary cuts the graph there: the
backward of loss, head and encoder ends in the gradients of the looked-up vectors, and the tables take them in a second backward, or never.

What each rank has to say travels as the gradient of three numbers that DDP averages with those of the dense part anyway: that something on
this rank is not finite, that it was asked to stop, and the squared norm of its vectors' gradients. Agreeing costs no exchange of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BAD, STOP, SQUARES = range(3)


class Boundary(nn.Module):
    """Holds gradients of looked-up vectors back, and reports of them.

    Attributes:
        flags: float32 `[3]`; never trained. After a backward their gradient is the mean over ranks of (bad, stop, squared norm).
        holds: whether the second backward is asked for; otherwise gradients run through to the tables at once, and only `stop` is reported.
        stop: whether this rank was asked to stop; it is read in the backward.
        held: key -> (vectors as looked up, the leaf that took their place) of the last forward, both `[n, D]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(3))
        self.holds = self.stop = False
        self.held: dict[str, tuple[Tensor, Tensor]] = {}
        self._token: Tensor | None = None

    def cut(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns leaves in the place of looked-up vectors, where gradients are held; the same vectors otherwise."""
        if not (self.holds and torch.is_grad_enabled()):
            return vectors
        self.held = {key: (found, found.detach().requires_grad_()) for key, found in vectors.items()}
        return {key: leaf for key, (_, leaf) in self.held.items()}

    def watch(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the same vectors, seen on the way back; without any the flags still belong to the graph."""
        if not torch.is_grad_enabled():
            return vectors
        token, *seen = _Watch.apply(self, self.flags, *vectors.values())  # type: ignore[no-untyped-call]
        self._token = token
        return dict(zip(vectors, seen, strict=True))

    def close(self, loss: Tensor) -> Tensor:
        """Returns the same loss, tied to the flags so that every rank reports, whatever its share of the step looks like."""
        token, self._token = self._token, None
        return loss if token is None else _Close.apply(loss, token)  # type: ignore[no-untyped-call]

    def release(self, factor: float = 1.0) -> None:
        """Gives the tables the gradients that were held, times `factor`: the second backward. A collective."""
        held, self.held = list(self.held.values()), {}
        if held:
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in held]
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            torch.autograd.backward([found for found, _ in held], gradients)

    def drop(self) -> None:
        """Forgets the gradients that were held; the tables stay as they are."""
        self.held = {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass  # nothing here is learnt, so a checkpoint has none of it

    def _load_from_state_dict(self, *given: Any) -> None:
        pass


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, flags: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.boundary = boundary
        return flags.new_zeros(()), *(found.view_as(found) for found in vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        token, *gradients = grads
        report = token.new_zeros(3)
        report[STOP] = float(ctx.boundary.stop)
        if ctx.boundary.holds:
            squares = token.new_zeros(())
            if gradients:
                squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
            total = squares + token  # the token's gradient is NaN where the loss is not finite
            sound = torch.isfinite(total)
            report[BAD], report[SQUARES] = (~sound).float(), torch.where(sound, squares, 0.0)
        return None, report, *gradients


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.where(torch.isfinite(loss), 0.0, torch.nan).to(grad)
