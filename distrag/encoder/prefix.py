"""Causal pooling: for each position the sum, mean or maximum of its own sequence up to it.

Each sequence is walked on its own. One running sum over the whole batch with the starts subtracted would be shorter, but rounding (or
a NaN) of one sequence would then reach all later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from distrag import ragged
from distrag.ragged import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, np.dtype[Any]]


@compiled
def _prefix_sum_rows(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = sum of the sequence's rows up to i
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b], offsets[b + 1]):
            for j in range(values.shape[1]):
                out[i, j] = values[i, j]
            if i > offsets[b]:
                for j in range(values.shape[1]):
                    out[i, j] += out[i - 1, j]


@compiled
def _suffix_sum(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = sum of the sequence's rows from i on: the backward of prefix_sum
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b + 1] - 1, offsets[b] - 1, -1):
            for j in range(values.shape[1]):
                out[i, j] = values[i, j]
            if i + 1 < offsets[b + 1]:
                for j in range(values.shape[1]):
                    out[i, j] += out[i + 1, j]


@compiled
def _prefix_max_rows(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = maximum of the sequence's rows up to i; a NaN wins and stays
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b], offsets[b + 1]):
            before = out[i - 1] if i > offsets[b] else values[i]
            for j in range(values.shape[1]):
                out[i, j] = before[j] if before[j] >= values[i, j] or before[j] != before[j] else values[i, j]


@compiled
def _prefix_max_backward_rows(grad: Array, values: Array, out: Array, offsets: Array, d_values: Array) -> None:
    # each gradient goes to the row that set the maximum: the oldest of equal ones
    carry = np.empty(values.shape[1], values.dtype)
    zero = values.dtype.type(0)
    for b in range(offsets.shape[0] - 1):
        carry[:] = 0
        for i in range(offsets[b + 1] - 1, offsets[b] - 1, -1):
            first = i == offsets[b]
            before = out[i] if first else out[i - 1]
            for j in range(values.shape[1]):
                total = carry[j] + grad[i, j]
                won = first or before[j] != out[i, j]
                d_values[i, j] = total if won else zero
                carry[j] = zero if won else total


class _PrefixSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _prefix_sum_rows(x.detach().contiguous().numpy(), offsets.numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _suffix_sum(grad.contiguous().numpy(), ctx.saved_tensors[0].numpy(), out.numpy())
        return out, None


class _PrefixMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        _prefix_max_rows(x.numpy(), offsets.numpy(), out.numpy())
        ctx.save_for_backward(x, out, offsets)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, out, offsets = (t.detach().numpy() for t in ctx.saved_tensors)
        d_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _prefix_max_backward_rows(grad.contiguous().numpy(), x, out, offsets, d_x.numpy())
        return d_x, None


_kernel_sum: Callable[..., Tensor] = _PrefixSum.apply
_kernel_max: Callable[..., Tensor] = _PrefixMax.apply


def prefix_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns for each position the sum of its own sequence up to it: `[sum_L, D]` from `x` `[sum_L, D]`."""
    if ragged.has_kernel(x):
        return _kernel_sum(x, offsets)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return ragged.unpad(ragged.pad(wide, offsets).cumsum(1), offsets).to(x.dtype)


def prefix_mean(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns for each position the mean of its own sequence up to it: `[sum_L, D]` from `x` `[sum_L, D]`."""
    count = torch.arange(1, x.shape[0] + 1, device=x.device) - torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=x.shape[0])
    return prefix_sum(x, offsets) / count[:, None].to(x.dtype)


def prefix_max(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns for each position the maximum of its own sequence up to it: `[sum_L, D]` from `x` `[sum_L, D]`."""
    if ragged.has_kernel(x):
        return _kernel_max(x, offsets)
    if x.shape[0] == 0:  # a running maximum of no columns is an error in torch
        return x
    return ragged.unpad(ragged.pad(x, offsets).cummax(1).values, offsets)
