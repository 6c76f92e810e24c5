"""Compiled CPU kernels of the encoders: recurrence and attention directly on ragged rows, nothing padded, nothing gathered.

No value of one sequence meets one of another, so no sequence can change a bit of another. All matrix work goes through `_add_product`.
float32 takes a polynomial for exp, float64 the exact function.
"""
# ruff: noqa: D103 - the first line of each kernel says in a comment what it writes

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import overload

from distrag.encoder.tile import make_tile
from distrag.ragged import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
_F = np.float32
_Function = TypeVar("_Function", bound="Callable[..., Any]")


def compiled_loosely(function: _Function) -> _Function:
    """Returns `function` compiled so that a sum may be taken in another order, which lets it use vectors; that order is always the same."""
    flags = {"contract", "reassoc", "nsz"}
    return cast("_Function", njit(cache=True, nogil=True, error_model="numpy", fastmath=flags)(function))


def _exp(x: Any) -> Any:
    """The exponential; float32 to 1e-7 relative, 0 below -87 counts as 1.6e-38."""
    raise NotImplementedError


def _exp32(x: Any) -> Any:
    # exp(x) = 2**k * exp(r) with |r| <= ln(2)/2. Source: Cephes expf, Moshier, 1989 (the coefficients). A NaN stays NaN.
    x = _F(-87.0) if x < _F(-87.0) else x
    x = _F(88.0) if x > _F(88.0) else x
    k = np.floor(x * _F(1.4426950408889634) + _F(0.5))
    r = x - k * _F(0.693359375)
    r = r - k * _F(-2.12194440e-4)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * r * r + r + _F(1.0)
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


def _exp64(x: Any) -> Any:
    return math.exp(x)


def _choose_exp(x: Any) -> Any:
    return _exp32 if x == types.float32 else _exp64


overload(_exp, jit_options={"fastmath": {"contract"}, "error_model": "numpy"})(_choose_exp)


_tile_4x32, _tile_4x16, _tile_4x1 = make_tile(4, 2), make_tile(4, 1), make_tile(4, 1, 1)
_tile_1x64, _tile_1x16, _tile_1x1 = make_tile(1, 4), make_tile(1, 1), make_tile(1, 1, 1)


@compiled
def _add_product(out: Array, a: Array, b: Array) -> None:
    # out [M, N] += a [M, K] @ b [K, N]; rows of out and b are contiguous, a may be a transposed view
    M, N = out.shape
    whole = M - M % 4
    for i in range(0, whole, 4):
        j = 0
        while j + 32 <= N:
            _tile_4x32(out, a, b, i, j)
            j += 32
        while j + 16 <= N:
            _tile_4x16(out, a, b, i, j)
            j += 16
        while j < N:
            _tile_4x1(out, a, b, i, j)
            j += 1
    for i in range(whole, M):
        j = 0
        while j + 64 <= N:
            _tile_1x64(out, a, b, i, j)
            j += 64
        while j + 16 <= N:
            _tile_1x16(out, a, b, i, j)
            j += 16
        while j < N:
            _tile_1x1(out, a, b, i, j)
            j += 1


# ---- GRU: four sequences of similar length step together, so that each weight is loaded once for four


@compiled
def _gru_cell(r: Array, z: Array, n: Array, r_in: Array, z_in: Array, n_in: Array, h: Array) -> None:
    # r, z, n: input parts, become the gates; *_in: recurrent parts; h: state, becomes the next
    one, two = h.dtype.type(1), h.dtype.type(2)
    for j in range(h.shape[0]):
        r[j] = one / (one + _exp(-(r[j] + r_in[j])))
    for j in range(h.shape[0]):
        z[j] = one / (one + _exp(-(z[j] + z_in[j])))
    for j in range(h.shape[0]):
        n[j] += r[j] * n_in[j]
    for j in range(h.shape[0]):  # tanh(x) = 2 / (1 + exp(-2x)) - 1
        n[j] = two / (one + _exp(-two * n[j])) - one
    for j in range(h.shape[0]):
        h[j] = n[j] + z[j] * (h[j] - n[j])


@compiled
def _copy(x: Array, out: Array) -> None:
    for j in range(out.shape[0]):
        out[j] = x[j]


@compiled
def gru_forward(gates: Array, w_hh_t: Array, b_hh: Array, offsets: Array, order: Array, hidden: Array, inner: Array) -> None:
    # gates [P, 3D] in: input part of r, z, n; out: their values. hidden [P, D]: states.
    # inner [P, D]: recurrent part of n before r scales it. order [B]: sequence numbers, longest first.
    D = hidden.shape[1]
    recurrent = np.empty((4, 3 * D), hidden.dtype)
    h = np.empty((4, D), hidden.dtype)
    for block in range(0, order.shape[0], 4):
        active = min(4, order.shape[0] - block)
        h[:] = 0
        for t in range(offsets[order[block] + 1] - offsets[order[block]]):
            while offsets[order[block + active - 1] + 1] - offsets[order[block + active - 1]] <= t:
                active -= 1
            for s in range(active):
                _copy(b_hh, recurrent[s])
            if t > 0:
                _add_product(recurrent[:active], h[:active], w_hh_t)
            for s in range(active):
                i = offsets[order[block + s]] + t
                g, r = gates[i], recurrent[s]
                _gru_cell(g[:D], g[D : 2 * D], g[2 * D :], r[:D], r[D : 2 * D], r[2 * D :], h[s])
                _copy(r[2 * D :], inner[i])
                _copy(h[s], hidden[i])


@compiled
def _gru_cell_backward(g: Array, q: Array, before: Array, carry: Array, d: Array) -> None:
    # carry: gradient of the state, becomes the part that reaches the state before through z.
    # d: gradients before the activations, of r, z, the recurrent part of n, and n.
    D = carry.shape[0]
    r, z, n, dr, dz, dq, dn = g[:D], g[D : 2 * D], g[2 * D :], d[:D], d[D : 2 * D], d[2 * D : 3 * D], d[3 * D :]
    one = carry.dtype.type(1)
    for j in range(carry.shape[0]):
        dn[j] = carry[j] * (one - z[j])
    for j in range(carry.shape[0]):
        dz[j] = (before[j] - n[j]) * z[j]
    for j in range(carry.shape[0]):
        dz[j] *= carry[j] * (one - z[j])
    for j in range(carry.shape[0]):
        dn[j] *= one - n[j] * n[j]
    for j in range(carry.shape[0]):
        dq[j] = dn[j] * r[j]
    for j in range(carry.shape[0]):
        dr[j] = dq[j] * (one - r[j])
    for j in range(carry.shape[0]):
        dr[j] *= q[j]
    for j in range(carry.shape[0]):
        carry[j] *= z[j]


@compiled
def gru_backward(
    results: tuple[Array, Array, Array], grad: Array, gates: Array, inner: Array, hidden: Array, w_hh: Array, offsets: Array, order: Array
) -> None:
    # results: d_gates [P, 3D], gradient of the input part; d_inner [P, D], of `inner`; before [P, D], the state before each position
    d_gates, d_inner, before = results
    D = hidden.shape[1]
    d = np.empty((4, 4 * D), hidden.dtype)
    carry = np.empty((4, D), hidden.dtype)
    start = np.zeros(D, hidden.dtype)
    for block in range(0, order.shape[0], 4):
        size = min(4, order.shape[0] - block)
        active = 0
        carry[:] = 0
        for t in range(offsets[order[block] + 1] - offsets[order[block]] - 1, -1, -1):
            while active < size and offsets[order[block + active] + 1] - offsets[order[block + active]] > t:
                active += 1
            for s in range(active):
                i = offsets[order[block + s]] + t
                c, own = carry[s], grad[i]
                for j in range(D):
                    c[j] += own[j]
                _copy(hidden[i - 1] if t > 0 else start, before[i])
                _gru_cell_backward(gates[i], inner[i], before[i], c, d[s])
                _copy(d[s], d_gates[i, : 2 * D])
                _copy(d[s, 3 * D :], d_gates[i, 2 * D :])
                _copy(d[s, 2 * D :], d_inner[i])
            if t > 0:
                _add_product(carry[:active], d[:active], w_hh)


# ---- attention: sixteen queries of one sequence and head at a time

_QUERIES = 16


@compiled
def _round_up(n: int) -> int:
    return (n + 15) // 16 * 16


@compiled
def _transpose(rows: Array, scale: Any, out: Array) -> None:
    # out[k, j] = rows[j, k] * scale, zeros after the last row up to a multiple of 16
    n = rows.shape[0]
    for k in range(out.shape[0]):
        for j in range(n):
            out[k, j] = rows[j, k] * scale
        for j in range(n, _round_up(n)):
            out[k, j] = 0


@compiled_loosely
def _maximum(x: Array) -> Any:
    top = x[0]
    for j in range(1, x.shape[0]):
        top = max(top, x[j])
    return top


@compiled_loosely
def _total(x: Array) -> Any:
    total = x.dtype.type(0)
    for j in range(x.shape[0]):
        total += x[j]
    return total


@compiled_loosely
def _dot(x: Array, y: Array) -> Any:
    total = x.dtype.type(0)
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@compiled
def _exp_minus(x: Array, shift: Any, count: int) -> None:
    # x[:count] <- exp(x - shift), 0 after
    for j in range(x.shape[0]):
        x[j] = _exp(x[j] - shift)
    for j in range(count, x.shape[0]):
        x[j] = 0


@compiled
def _scale(x: Array, factor: Any) -> None:
    for j in range(x.shape[0]):
        x[j] *= factor


@compiled
def attention_forward(qkv: Array, offsets: Array, num_heads: int, causal: bool, longest: int, out: Array, log_sum: Array) -> None:
    # out [P, D] = softmax(q k / sqrt(D / H)) v inside each sequence and head; log_sum [P, H]: log of the softmax's denominator.
    D = out.shape[1]
    W = D // num_heads
    one = out.dtype.type(1)
    scale = out.dtype.type(1.0 / math.sqrt(W))
    keys = np.empty((W, _round_up(longest)), out.dtype)
    scores = np.empty((_QUERIES, _round_up(longest)), out.dtype)
    out[:] = 0
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        for at in range(0, D, W):
            _transpose(qkv[begin:end, D + at : D + at + W], scale, keys)
            for block in range(begin, end, _QUERIES):
                stop = min(block + _QUERIES, end)
                most = stop - begin if causal else end - begin
                weights = scores[: stop - block, : _round_up(most)]
                weights[:] = 0
                _add_product(weights, qkv[block:stop, at : at + W], keys)
                for i in range(block, stop):
                    n = i + 1 - begin if causal else most
                    row = weights[i - block]
                    top = _maximum(row[:n])
                    _exp_minus(row, top, n)
                    total = _total(row[:n])
                    _scale(row, one / total)
                    log_sum[i, at // W] = top + math.log(total)
                values = qkv[begin : begin + most, 2 * D + at : 2 * D + at + W]
                _add_product(out[block:stop, at : at + W], weights[:, :most], values)


@compiled
def attention_backward(
    grad: Array, qkv: Array, offsets: Array, options: tuple[int, bool, int], out: Array, log_sum: Array, d_qkv: Array
) -> None:
    # d_qkv [P, 3D]; options as in attention_forward. The weights are computed again from log_sum: nothing of size L * L is kept.
    num_heads, causal, longest = options
    D = out.shape[1]
    W = D // num_heads
    one = out.dtype.type(1)
    scale = out.dtype.type(1.0 / math.sqrt(W))
    keys = np.empty((W, _round_up(longest)), out.dtype)
    values = np.empty((W, _round_up(longest)), out.dtype)
    scores = np.empty((_QUERIES, _round_up(longest)), out.dtype)
    d_scores = np.empty((_QUERIES, _round_up(longest)), out.dtype)
    d_qkv[:] = 0
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        for at in range(0, D, W):
            q, k, v = slice(at, at + W), slice(D + at, D + at + W), slice(2 * D + at, 2 * D + at + W)
            _transpose(qkv[begin:end, k], scale, keys)
            _transpose(qkv[begin:end, v], one, values)
            for block in range(begin, end, _QUERIES):
                stop = min(block + _QUERIES, end)
                most = stop - begin if causal else end - begin
                weights, d_weights = scores[: stop - block, : _round_up(most)], d_scores[: stop - block, : _round_up(most)]
                weights[:] = 0
                _add_product(weights, qkv[block:stop, q], keys)
                for i in range(block, stop):
                    d_weights[i - block] = -_dot(grad[i, q], out[i, q])
                _add_product(d_weights, grad[block:stop, q], values)
                for i in range(block, stop):
                    row, d_row = weights[i - block], d_weights[i - block]
                    _exp_minus(row, log_sum[i, at // W], i + 1 - begin if causal else most)
                    for j in range(row.shape[0]):
                        d_row[j] *= row[j] * scale
                seen = slice(begin, begin + most)
                _add_product(d_qkv[block:stop, q], d_weights[:, :most], qkv[seen, k])
                _add_product(d_qkv[seen, k], d_weights[:, :most].T, qkv[block:stop, q])
                _add_product(d_qkv[seen, v], weights[:, :most].T, grad[block:stop, q])


# ---- prefixes


@compiled
def prefix_sum(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = sum of the sequence's rows up to i
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b], offsets[b + 1]):
            for j in range(values.shape[1]):
                out[i, j] = values[i, j]
            if i > offsets[b]:
                for j in range(values.shape[1]):
                    out[i, j] += out[i - 1, j]


@compiled
def suffix_sum(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = sum of the sequence's rows from i on: the backward of prefix_sum
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b + 1] - 1, offsets[b] - 1, -1):
            for j in range(values.shape[1]):
                out[i, j] = values[i, j]
            if i + 1 < offsets[b + 1]:
                for j in range(values.shape[1]):
                    out[i, j] += out[i + 1, j]


@compiled
def prefix_max(values: Array, offsets: Array, out: Array) -> None:
    # out[i] = maximum of the sequence's rows up to i; a NaN wins and stays
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b], offsets[b + 1]):
            before = out[i - 1] if i > offsets[b] else values[i]
            for j in range(values.shape[1]):
                out[i, j] = before[j] if before[j] >= values[i, j] or before[j] != before[j] else values[i, j]


@compiled
def prefix_max_backward(grad: Array, values: Array, out: Array, offsets: Array, d_values: Array) -> None:
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
