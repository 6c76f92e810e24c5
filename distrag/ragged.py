"""Operations on ragged values: a flat `[sum_L, ...]` tensor and int64 offsets `[B+1]`, nothing padded.

Sequence b owns the rows `offsets[b] .. offsets[b+1]`, oldest first. On the CPU float32 and float64 run in compiled
kernels; other dtypes and devices run in torch ops that give the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, np.dtype[Any]]

Side = Literal["left", "right"]
_Function = TypeVar("_Function", bound="Callable[..., Any]")


def compiled(function: _Function) -> _Function:
    """Returns `function` compiled by numba: cached on disk, without the GIL, fused multiply-adds, IEEE division.

    Trap: numba notices a change in the file of the function itself only, so kernels that call each other live in one file.
    """
    return cast("_Function", njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})(function))


def has_kernel(*tensors: Tensor) -> bool:
    """True when every tensor is float32 or float64 on the CPU, all of one dtype: what the compiled kernels take; never while tracing."""
    dtype = tensors[0].dtype
    return (
        not torch.compiler.is_compiling()
        and dtype in (torch.float32, torch.float64)
        and all(t.device.type == "cpu" and t.dtype == dtype for t in tensors)
    )


# ---- lengths, offsets, positions


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Returns int64 offsets `[B+1]`: 0, then the running sum of `lengths`.

    The sum is taken in int64 whatever integer type the lengths have: an int32 sum wraps at 2**31 without a word.

    Args:
        lengths: integers `[B]`.
    """
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def segment_ids(offsets: Tensor, num_values: int) -> Tensor:
    """Returns for each of the `num_values` rows the number of its sequence, int64 `[sum_L]`; no device synchronisation."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=num_values)


def age(offsets: Tensor, num_values: int) -> Tensor:
    """Returns each row's distance from the newest row of its own sequence, int64 `[sum_L]`: L-1 .. 1, 0."""
    ends = torch.repeat_interleave(offsets[1:], offsets.diff(), output_size=num_values)
    return ends - torch.arange(1, num_values + 1, device=offsets.device)


# ---- rectangles


def _cells(offsets: Tensor, num_values: int, length: int, side: Side) -> Tensor:
    """Cell of the flattened `[B, length]` rectangle that each row belongs in; negative columns mark rows cut off."""
    rows = segment_ids(offsets, num_values)
    if side == "left":
        return rows * length + (length - 1 - age(offsets, num_values))
    cut = (offsets.diff() - length).clamp_min(0)
    return rows * length + torch.arange(num_values, device=offsets.device) - (offsets[:-1] + cut)[rows]


def pad(values: Tensor, offsets: Tensor, length: int | None = None, side: Side = "right") -> Tensor:
    """Returns a rectangle `[B, T, ...]` with zeros beside each sequence; a sequence longer than T keeps its newest rows.

    Args:
        values: `[sum_L, ...]`.
        offsets: int64 `[B+1]`.
        length: T; the longest sequence when None (which waits for the device).
        side: the side the zeros go to.
    """
    lengths = offsets.diff()
    B, P = lengths.shape[0], values.shape[0]
    longest = int(lengths.max()) if B else 0
    T = longest if length is None else length
    if longest > T:
        kept = age(offsets, P) < T
        values, offsets = values[kept], lengths_to_offsets(lengths.clamp_max(T))
        P = values.shape[0]
    out = values.new_zeros((B * T, *values.shape[1:]))
    return out.index_copy(0, _cells(offsets, P, T, side), values).view(B, T, *values.shape[1:])


def unpad(padded: Tensor, offsets: Tensor, side: Side = "right") -> Tensor:
    """Returns the rows `[sum_L, ...]` of a rectangle `[B, T, ...]` that `pad` made; no length may exceed T."""
    num_values = int(offsets[-1])
    return padded.flatten(0, 1).index_select(0, _cells(offsets, num_values, padded.shape[1], side))


def shift_next(values: Tensor, offsets: Tensor, last: Tensor) -> Tensor:
    """Returns for each row the value of the following row of its own sequence, and `last[b]` for the newest: `[sum_L, ...]`.

    Turns history ids (or vectors) into next-item targets. Differentiable in both.

    Args:
        values: `[sum_L, ...]`.
        offsets: int64 `[B+1]`.
        last: `[B, ...]`, what follows each sequence; entries of empty sequences are not used.
    """
    P = values.shape[0]
    rows = segment_ids(offsets, P)
    following = torch.arange(1, P + 1, device=offsets.device)
    source = torch.where(following == offsets[1:][rows], P + rows, following)
    return torch.cat([values, last.to(values.dtype)]).index_select(0, source)


def last(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the newest row of each sequence, zeros for an empty one: `[B, ...]`."""
    B = offsets.shape[0] - 1
    if values.shape[0] == 0:  # keeps the graph: the gradient is an empty tensor, not None
        return values.sum(0, keepdim=True).expand(B, *values.shape[1:])
    rows = values.index_select(0, (offsets[1:] - 1).clamp_min(0))
    filled = (offsets.diff() > 0).view(-1, *[1] * (values.dim() - 1))
    return torch.where(filled, rows, torch.zeros((), dtype=values.dtype, device=values.device))


# ---- one number per sequence


@compiled
def _sum_rows(values: Array, offsets: Array, out: Array) -> None:
    for b in range(out.shape[0]):
        for i in range(offsets[b], offsets[b + 1]):
            for j in range(out.shape[1]):
                out[b, j] += values[i, j]


@compiled
def _max_rows(values: Array, offsets: Array, out: Array, winner: Array) -> None:
    for b in range(out.shape[0]):
        if offsets[b] == offsets[b + 1]:
            continue
        for j in range(out.shape[1]):
            out[b, j] = values[offsets[b], j]
            winner[b, j] = offsets[b]
        for i in range(offsets[b] + 1, offsets[b + 1]):
            for j in range(out.shape[1]):
                v = values[i, j]
                better = v > out[b, j] or v != v  # a NaN wins and stays, so that it is seen
                winner[b, j] = i if better else winner[b, j]
                out[b, j] = v if better else out[b, j]


def _array(tensor: Tensor) -> Array:
    return cast("Array", tensor.detach().contiguous().numpy())


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.num_values = values.shape[0]
        out = values.new_zeros(offsets.shape[0] - 1, values.shape[1])
        _sum_rows(_array(values), _array(offsets), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        lengths = ctx.saved_tensors[0].diff()
        return grad.repeat_interleave(lengths, 0, output_size=ctx.num_values), None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        out = values.new_zeros(offsets.shape[0] - 1, values.shape[1])
        winner = torch.full(out.shape, -1, dtype=torch.int64)
        _max_rows(_array(values), _array(offsets), out.numpy(), winner.numpy())
        ctx.save_for_backward(winner)
        ctx.num_values = values.shape[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        winner = ctx.saved_tensors[0]
        out = grad.new_zeros(ctx.num_values + 1, grad.shape[1])  # the last row takes what empty sequences send: winner -1
        return out.scatter_(0, winner.remainder(ctx.num_values + 1), grad)[:-1], None


_kernel_sum: Callable[..., Tensor] = _Sum.apply
_kernel_max: Callable[..., Tensor] = _Max.apply


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sum over each sequence, zeros for an empty one: `[B, D]` from values `[sum_L, D]`.

    Cost: the compiled kernel was faster than index_add, embedding_bag and segment_reduce at every size measured; each sequence is
    summed on its own in storage order, so neither its neighbours nor the batch can change a bit of it.
    """
    if has_kernel(values):
        return _kernel_sum(values, offsets)
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return torch.segment_reduce(wide, "sum", offsets=offsets, initial=0, unsafe=True).to(values.dtype)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the mean over each sequence, zeros for an empty one: `[B, D]` from values `[sum_L, D]`."""
    return segment_sum(values, offsets) / offsets.diff().clamp_min(1)[:, None].to(values.dtype)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the maximum over each sequence, zeros for an empty one: `[B, D]` from values `[sum_L, D]`."""
    if has_kernel(values):
        return _kernel_max(values, offsets)
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    out = torch.segment_reduce(wide, "max", offsets=offsets, initial=float("-inf"), unsafe=True)
    return torch.where(offsets.diff()[:, None] > 0, out, 0.0).to(values.dtype)


# ---- groups of similar length


def length_groups(lengths: Tensor, growth: float = 1.3, step: int = 4) -> list[Tensor]:
    """Returns groups of sequence numbers, int64, such that a rectangle per group holds little padding; empty ones are left out.

    A group holds the lengths from some l up to about `growth * l + step`. A finer cut saves less than its extra calls cost.

    Args:
        lengths: integers `[B]`.
        growth: how much longer than the shortest the longest of a group may be.
        step: how many rows more than that.
    """
    ordered, order = torch.sort(lengths.cpu(), stable=True)
    sizes = ordered.numpy()
    begin = int(np.searchsorted(sizes, 1))
    groups = []
    while begin < len(sizes):
        end = int(np.searchsorted(sizes, sizes[begin] * growth + step, side="right"))
        groups.append(order[begin:end].to(lengths.device))
        begin = end
    return groups


# ---- random numbers that belong to a position, not to a rank

_MASK32 = 0xFFFFFFFF
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_COLUMN, _MUL_A, _MUL_B = 0x9E3779B1, 0x7FEB352D, 0x846CA68B


def _signed(number: int) -> int:
    """The int64 with the low 64 bits of `number`, for torch, which has no uint64 arithmetic."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scrambles int64 bit patterns one to one.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_A)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_B)
    return x ^ _shift_right(x, 31)


def position_keys(samples: Tensor, offsets: Tensor, seed: int, epoch: int, step: int) -> Tensor:
    """Returns one key per position, int64 `[sum_L]`, made of (seed, epoch, step, sample, position) alone.

    The same sample gets the same keys on whatever rank and beside whatever neighbours it is computed.

    Args:
        samples: int64 `[B]`, sample numbers.
        offsets: int64 `[B+1]`.
        seed: of the run.
        epoch: number of the epoch.
        step: number of the global step.
    """
    mixed = _mix(torch.tensor([_signed(seed), epoch, step]))
    starts = _mix(samples ^ _signed(int(mixed[0]) + 3 * int(mixed[1]) + 5 * int(mixed[2])))
    if samples.device.type != "cpu":
        return spread_keys(starts, offsets)
    keys = torch.empty(int(offsets[-1]), dtype=torch.int64)
    _spread(_array(starts), _array(offsets), keys.numpy())
    return keys


def spread_keys(starts: Tensor, offsets: Tensor) -> Tensor:
    """Returns one key per position out of one per sequence, in torch ops, int64 `[sum_L]`; bit for bit the kernel's."""
    per_row = torch.repeat_interleave(torch.stack([starts, offsets[:-1]], 1), offsets.diff(), dim=0)
    position = torch.arange(per_row.shape[0], device=starts.device) - per_row[:, 1]
    return _mix(per_row[:, 0] + position)


@compiled
def _spread(starts: Array, offsets: Array, out: Array) -> None:
    for b in range(starts.shape[0]):
        for i in range(offsets[b], offsets[b + 1]):
            z = np.uint64(starts[b]) + np.uint64(i - offsets[b]) + np.uint64(_GOLDEN)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_A)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_B)
            out[i] = np.int64(z ^ (z >> np.uint64(31)))


@compiled
def _drop(x: Array, keys: Array, site: np.uint64, threshold: np.uint32, scale: float, out: Array) -> None:
    one = x.dtype.type(scale)
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        z = np.uint64(keys[i]) ^ site
        z = z + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_A)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_B)
        z = z ^ (z >> np.uint64(31))
        low = np.uint32(z)
        high = np.uint32(z >> np.uint64(32))
        for j in range(x.shape[1]):
            h = np.uint32(low + np.uint32(np.uint32(j) * np.uint32(_COLUMN)))
            h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(_MUL_A))
            h = np.uint32(h ^ high)
            h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(_MUL_B))
            h = np.uint32(h ^ (h >> np.uint32(16)))
            out[i, j] = x[i, j] * one if h >= threshold else zero


def keep_mask(keys: Tensor, columns: int, p: float, site: int) -> Tensor:
    """Returns the mask of `dropout` in torch ops, bool `[sum_L, columns]`, True where a value is kept; bit for bit the kernel's."""
    rows = _mix(keys ^ _signed(site * _GOLDEN))[:, None]
    h = ((rows & _MASK32) + torch.arange(columns, device=keys.device) * _COLUMN) & _MASK32
    h = ((h ^ (h >> 16)) * _MUL_A) & _MASK32
    h = h ^ _shift_right(rows, 32)
    h = ((h ^ (h >> 15)) * _MUL_B) & _MASK32
    return (h ^ (h >> 16)) >= _threshold(p)


def _threshold(p: float) -> int:
    return min(round(p * 2**32), _MASK32)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p, ctx.site = p, site
        return _dropped(x, p, keys, site)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _dropped(grad, ctx.p, ctx.saved_tensors[0], ctx.site), None, None, None


def _dropped(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    scale = 1.0 / (1.0 - p)
    if not has_kernel(x):
        return torch.where(keep_mask(keys, x.shape[1], p, site), x * scale, torch.zeros((), dtype=x.dtype, device=x.device))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    word = np.uint64(site * _GOLDEN & ((1 << 64) - 1))
    _drop(_array(x), _array(keys), word, np.uint32(_threshold(p)), scale, out.numpy())
    return out


_kernel_dropout: Callable[..., Tensor] = _Dropout.apply


def dropout(x: Tensor, p: float, keys: Tensor | None, site: int) -> Tensor:
    """Returns `x` with a share p of its values set to 0 and the others divided by 1-p: `[sum_L, D]`.

    The mask is a hash of (key of the row, site, column): nothing is stored, backward computes it again, and it depends on neither rank nor
    neighbours. Cost: about 1 ns an element, a twentieth of torch's own generator on the CPU.

    Args:
        x: `[sum_L, D]`.
        p: share to drop, 0 <= p < 1.
        keys: int64 `[sum_L]` from `position_keys`; None takes torch's generator.
        site: a number per place in the model, so that two places draw different masks.
    """
    if p == 0.0:
        return x
    return F.dropout(x, p) if keys is None else _kernel_dropout(x, p, keys, site)
