"""Between the sharded tables and the rest of the model: where gradients wait until every rank knows that they are sound.

A sharded table is updated inside the backward of its lookup, before anything could skip the step. The boundary cuts the graph there: the
backward of loss, head and encoder ends in the gradients of the looked-up vectors, and the tables take them in a second backward, or never.

What each rank has to say travels as the gradient of three numbers that DDP averages with those of the dense part anyway: that something on
this rank is not finite, that it was asked to stop, and the squared norm of its vectors' gradients. Agreeing costs no exchange of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BAD, STOP, SQUARES = range(3)
_MOST = torch.finfo(torch.float32).max


class Boundary(nn.Module):
    """Holds gradients of looked-up vectors back, and reports of them.

    Attributes:
        flags: float32 `[3]`; never trained. After a backward their gradient is the mean over ranks of (bad, stop, squared norm).
        now: what the step at hand asks for, and holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(3))
        self.now = Now()

    def cut(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns leaves in the place of looked-up vectors, where gradients are held; the same vectors otherwise."""
        if not (self.now.holds and torch.is_grad_enabled()):
            return vectors
        self.now.held = held = {key: (found, found.detach().requires_grad_()) for key, found in vectors.items()}
        return {key: leaf for key, (_, leaf) in held.items()}

    def watch(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the same vectors, seen on the way back; without any the flags still belong to the graph."""
        if not torch.is_grad_enabled():
            return vectors
        self.now.token, *seen = _Watch.apply(self.now, self.flags, *vectors.values())  # type: ignore[no-untyped-call]
        return dict(zip(vectors, seen, strict=True))

    def close(self, loss: Tensor) -> Tensor:
        """Returns the same loss, tied to the flags so that every rank reports, whatever its share of the step looks like."""
        token, self.now.token = self.now.token, None
        return loss if token is None else _Close.apply(loss, token)  # type: ignore[no-untyped-call]

    def release(self, factor: float = 1.0) -> None:
        """Gives the tables the gradients that were held, times `factor`: the second backward. A collective."""
        held, self.now.held = list(self.now.held.values()), {}
        if held:
            gradients = [leaf.grad for _, leaf in held if leaf.grad is not None]  # the watch gives each one, of zeros at least
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            torch.autograd.backward([found for found, _ in held], gradients)

    def drop(self) -> None:
        """Forgets the gradients that were held; the tables stay as they are."""
        self.now.held = {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass  # nothing here is learnt, so a checkpoint has none of it

    def _load_from_state_dict(self, *given: Any) -> None:
        pass


def never() -> bool:
    """Returns False: nobody asks this rank to stop."""
    return False


class Now:
    """What a step asks of the boundary, and what it holds. Apart from the module, whose every assignment costs microseconds.

    Attributes:
        holds: whether the second backward is asked for; otherwise gradients run through to the tables at once, and only `stop` is reported.
        stop: tells whether this rank was asked to stop; asked in the backward.
        held: key -> (vectors as looked up, the leaf that took their place) of the last forward, both `[n, D]`.
        token: ties the loss to the flags.
    """

    def __init__(self) -> None:
        self.holds = False
        self.stop: Callable[[], bool] = never
        self.held: dict[str, tuple[Tensor, Tensor]] = {}
        self.token: Tensor | None = None


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, now: Now, flags: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.now = now
        return flags.new_zeros(()), *(found.view_as(found) for found in vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        token, *gradients = grads
        stop = float(ctx.now.stop())
        if not ctx.now.holds:
            return None, torch.tensor([0.0, stop, 0.0], device=token.device), *gradients
        norms = [token, *torch._foreach_norm(gradients)] if gradients else [token]  # the token's is NaN where the loss is not finite
        if token.is_cuda:
            squares = torch.stack(norms).square().sum()
            sound = torch.isfinite(squares)
            return None, torch.stack([(~sound).float(), torch.full_like(token, stop), torch.where(sound, squares, 0.0)]), *gradients
        total = sum(float(norm) ** 2 for norm in norms)  # a few numbers: quicker here than as tensors
        bad = not total <= _MOST  # as on CUDA: the report holds no larger number
        return None, torch.tensor([float(bad), stop, 0.0 if bad else total]), *gradients


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, (loss - loss).to(grad)  # 0, or NaN where the loss is not finite
