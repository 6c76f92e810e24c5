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
    """The exponential; float32 to 1e-7 relative, 0 below -87: what is left of a denormal would slow every product it enters."""
    raise NotImplementedError


def _exp32(x: Any) -> Any:
    # exp(x) = 2**k * exp(r) with |r| <= ln(2)/2. Source: Cephes expf, Moshier, 1989 (the coefficients). A NaN stays NaN.
    tiny = x < _F(-87.0)
    x = _F(-87.0) if tiny else x
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
    y = p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return _F(0.0) if tiny else y


def _exp64(x: Any) -> Any:
    return math.exp(x)


def _choose_exp(x: Any) -> Any:
    return _exp32 if x == types.float32 else _exp64


overload(_exp, jit_options={"fastmath": {"contract"}, "error_model": "numpy"})(_choose_exp)


def _make_product(add: bool) -> Callable[[Array, Array, Array], None]:
    tile_4x32, tile_4x16, tile_4x1 = make_tile(4, 2, add=add), make_tile(4, 1, add=add), make_tile(4, 1, 1, add=add)
    tile_1x64, tile_1x16, tile_1x1 = make_tile(1, 4, add=add), make_tile(1, 1, add=add), make_tile(1, 1, 1, add=add)

    @compiled
    def product(out: Array, a: Array, b: Array) -> None:
        M, N = out.shape
        whole = M - M % 4
        for i in range(0, whole, 4):
            j = 0
            while j + 32 <= N:
                tile_4x32(out, a, b, i, j)
                j += 32
            while j + 16 <= N:
                tile_4x16(out, a, b, i, j)
                j += 16
            while j < N:
                tile_4x1(out, a, b, i, j)
                j += 1
        for i in range(whole, M):
            j = 0
            while j + 64 <= N:
                tile_1x64(out, a, b, i, j)
                j += 64
            while j + 16 <= N:
                tile_1x16(out, a, b, i, j)
                j += 16
            while j < N:
                tile_1x1(out, a, b, i, j)
                j += 1

    return product


# out [M, N] = (or +=) a [M, K] @ b [K, N]; rows of out and b are contiguous, a may be a transposed view
_set_product, _add_product = _make_product(False), _make_product(True)


# ---- GRU: four sequences of similar length step together, so that each weight is loaded once for four


# Cost: helpers take whole arrays and row numbers. A slice per row would count references with atomic instructions, a tenth of the time.


@compiled
def _copy(rows: Array, i: int, column: int, out: Array, k: int, at: int, count: int) -> None:
    # out[k, at:at+count] = rows[i, column:column+count]
    for j in range(count):
        out[k, at + j] = rows[i, column + j]


@compiled
def _gru_cell(gates: Array, i: int, recurrent: Array, h: Array, s: int) -> None:
    # gates[i]: input parts of r, z, n, become the gates; recurrent[s]: recurrent parts; h[s]: state, becomes the next
    D = h.shape[1]
    one, two = h.dtype.type(1), h.dtype.type(2)
    for j in range(2 * D):
        gates[i, j] = one / (one + _exp(-(gates[i, j] + recurrent[s, j])))
    for j in range(D):
        recurrent[s, j] = gates[i, j] * recurrent[s, 2 * D + j]
    for j in range(D):  # tanh(x) = 2 / (1 + exp(-2x)) - 1
        gates[i, 2 * D + j] = two / (one + _exp(-two * (gates[i, 2 * D + j] + recurrent[s, j]))) - one
    for j in range(D):
        h[s, j] = gates[i, 2 * D + j] + gates[i, D + j] * (h[s, j] - gates[i, 2 * D + j])


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
                for j in range(3 * D):
                    recurrent[s, j] = b_hh[j]
            if t > 0:
                _add_product(recurrent[:active], h[:active], w_hh_t)
            for s in range(active):
                i = offsets[order[block + s]] + t
                _copy(recurrent, s, 2 * D, inner, i, 0, D)
                _gru_cell(gates, i, recurrent, h, s)
                _copy(h, s, 0, hidden, i, 0, D)


@compiled
def _gru_cell_backward(gates: Array, inner: Array, before: Array, i: int, carry: Array, d: Array, s: int) -> None:
    # carry[s]: gradient of the state, becomes the part that reaches the state before through z.
    # d[s]: gradients before the activations, of r, z, the recurrent part of n, and n.
    D = carry.shape[1]
    R, Z, N, Q = 0, D, 2 * D, 3 * D  # columns: in d the recurrent part of n comes third, n itself last
    one = carry.dtype.type(1)
    for j in range(D):
        n = gates[i, N + j]
        d[s, Q + j] = carry[s, j] * (one - gates[i, Z + j]) * (one - n * n)
    for j in range(D):
        z = gates[i, Z + j]
        d[s, Z + j] = carry[s, j] * (before[i, j] - gates[i, N + j]) * z * (one - z)
    for j in range(D):
        d[s, N + j] = d[s, Q + j] * gates[i, R + j]
    for j in range(D):
        d[s, R + j] = d[s, N + j] * inner[i, j] * (one - gates[i, R + j])
    for j in range(D):
        carry[s, j] *= gates[i, Z + j]


@compiled
def gru_backward(
    results: tuple[Array, Array, Array], grad: Array, gates: Array, inner: Array, hidden: Array, w_hh: Array, offsets: Array, order: Array
) -> None:
    # results: d_gates [P, 3D], gradient of the input part; d_inner [P, D], of `inner`; before [P, D], the state before each position
    d_gates, d_inner, before = results
    D = hidden.shape[1]
    d = np.empty((4, 4 * D), hidden.dtype)
    carry = np.empty((4, D), hidden.dtype)
    for block in range(0, order.shape[0], 4):
        size = min(4, order.shape[0] - block)
        active = 0
        carry[:] = 0
        for t in range(offsets[order[block] + 1] - offsets[order[block]] - 1, -1, -1):
            while active < size and offsets[order[block + active] + 1] - offsets[order[block + active]] > t:
                active += 1
            for s in range(active):
                i = offsets[order[block + s]] + t
                for j in range(D):
                    carry[s, j] += grad[i, j]
                if t > 0:
                    _copy(hidden, i - 1, 0, before, i, 0, D)
                else:
                    before[i] = 0
                _gru_cell_backward(gates, inner, before, i, carry, d, s)
                _copy(d, s, 0, d_gates, i, 0, 2 * D)
                _copy(d, s, 3 * D, d_gates, i, 2 * D, D)
                _copy(d, s, 2 * D, d_inner, i, 0, D)
            if t > 0:
                _add_product(carry[:active], d[:active], w_hh)


# ---- attention: sixteen queries of one sequence and head at a time

_QUERIES = 16


@compiled
def _round_up(n: int) -> int:
    return (n + 15) // 16 * 16


# Trap: only whole arrays are known to be contiguous. A row of a slice of columns would run without vectors.


@compiled
def _transpose(rows: Array, begin: int, column: int, count: int, scale: Any, out: Array) -> None:
    # out[k, j] = rows[begin + j, column + k] * scale for j < count; what stands behind is old and must not be used
    for j in range(count):
        for k in range(out.shape[0]):
            out[k, j] = rows[begin + j, column + k] * scale


@compiled
def _maximum(rows: Array, r: int, wide: int, lanes: Array) -> Any:
    # sixteen maxima side by side, which a vector holds; `wide` is a multiple of 16
    for j in range(16):
        lanes[j] = rows[r, j]
    for block in range(16, wide, 16):
        for j in range(16):
            v = rows[r, block + j]
            lanes[j] = v if v > lanes[j] else lanes[j]
    top = lanes[0]
    for j in range(1, 16):
        top = lanes[j] if lanes[j] > top else top
    return top


@compiled_loosely
def _total(rows: Array, r: int, wide: int) -> Any:
    total = rows.dtype.type(0)
    for j in range(wide):
        total += rows[r, j]
    return total


@compiled_loosely
def _dot(x: Array, y: Array, i: int, at: int, count: int) -> Any:
    total = x.dtype.type(0)
    for j in range(count):
        total += x[i, at + j] * y[i, at + j]
    return total


@compiled
def _exp_minus(rows: Array, r: int, shift: Any, count: int, wide: int) -> None:
    # rows[r, :count] <- exp(itself - shift), 0 from there up to `wide`
    for j in range(wide):
        rows[r, j] = _exp(rows[r, j] - shift)
    for j in range(count, wide):
        rows[r, j] = 0


@compiled
def _softmax(rows: Array, r: int, count: int, wide: int, lanes: Array) -> Any:
    # rows[r, :count] <- its softmax, 0 from there up to `wide`; returns the log of the denominator
    for j in range(count, wide):
        rows[r, j] = -np.inf
    top = _maximum(rows, r, wide, lanes)
    _exp_minus(rows, r, top, count, wide)
    total = _total(rows, r, wide)
    factor = rows.dtype.type(1) / total
    for j in range(wide):
        rows[r, j] *= factor
    return top + math.log(total)


@compiled
def attention_forward(qkv: Array, offsets: Array, num_heads: int, causal: bool, longest: int, out: Array, log_sum: Array) -> None:
    # out [P, D] = softmax(q k / sqrt(D / H)) v inside each sequence and head; log_sum [P, H]: log of the softmax's denominator.
    # Keys and values are copied together first: rows 3D apart fall on the same few cache sets.
    D = out.shape[1]
    W = D // num_heads
    scale = out.dtype.type(1.0 / math.sqrt(W))
    keys = np.zeros((W, _round_up(longest)), out.dtype)  # not empty: chance denormals behind a short sequence cost tenfold
    values = np.empty((longest, W), out.dtype)
    scores = np.empty((_QUERIES, _round_up(longest)), out.dtype)
    lanes = np.empty(16, out.dtype)
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        for head in range(num_heads):
            at = head * W
            _transpose(qkv, begin, D + at, end - begin, scale, keys)
            for j in range(end - begin):
                _copy(qkv, begin + j, 2 * D + at, values, j, 0, W)
            for block in range(begin, end, _QUERIES):
                stop = min(block + _QUERIES, end)
                most = stop - begin if causal else end - begin
                wide = _round_up(most)
                weights = scores[: stop - block, :wide]
                _set_product(weights, qkv[block:stop, at : at + W], keys)
                for i in range(block, stop):
                    log_sum[i, head] = _softmax(scores, i - block, i + 1 - begin if causal else most, wide, lanes)
                _set_product(out[block:stop, at : at + W], weights, values[:most])


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
    keys, values = np.zeros((W, _round_up(longest)), out.dtype), np.zeros((W, _round_up(longest)), out.dtype)
    key_rows, d_keys, d_values = np.empty((longest, W), out.dtype), np.empty((longest, W), out.dtype), np.empty((longest, W), out.dtype)
    scores, d_scores = np.empty((_QUERIES, _round_up(longest)), out.dtype), np.empty((_QUERIES, _round_up(longest)), out.dtype)
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        L = end - begin
        for head in range(num_heads):
            at = head * W
            _transpose(qkv, begin, D + at, L, scale, keys)
            _transpose(qkv, begin, 2 * D + at, L, one, values)
            for j in range(L):
                _copy(qkv, begin + j, D + at, key_rows, j, 0, W)
                for k in range(W):
                    d_keys[j, k] = 0
                for k in range(W):
                    d_values[j, k] = 0
            for block in range(begin, end, _QUERIES):
                stop = min(block + _QUERIES, end)
                most = stop - begin if causal else L
                wide = _round_up(most)
                weights, d_weights = scores[: stop - block, :wide], d_scores[: stop - block, :wide]
                queries, grads = qkv[block:stop, at : at + W], grad[block:stop, at : at + W]
                _set_product(weights, queries, keys)
                _set_product(d_weights, grads, values)
                for i in range(block, stop):
                    r, n = i - block, i + 1 - begin if causal else most
                    _exp_minus(scores, r, log_sum[i, head], n, wide)
                    shift = _dot(grad, out, i, at, W)
                    for j in range(n):
                        d_scores[r, j] = (d_scores[r, j] - shift) * (scores[r, j] * scale)
                    for j in range(n, wide):
                        d_scores[r, j] = 0
                _set_product(d_qkv[block:stop, at : at + W], d_weights, key_rows[:most])
                _add_product(d_keys[:most], d_weights.T, queries)
                _add_product(d_values[:most], weights.T, grads)
            for j in range(L):
                _copy(d_keys, j, 0, d_qkv, begin + j, D + at, W)
                _copy(d_values, j, 0, d_qkv, begin + j, 2 * D + at, W)
