"""Compiled CPU kernels of the encoders: recurrence and attention directly on ragged rows, nothing padded, nothing gathered.

Every kernel walks one sequence after the other, so no sequence can change a bit of another. All matrix work goes through `_add_rows`,
whose inner loop runs along contiguous memory and keeps eight fused multiply-adds per load and store of the result; a library call per
step would cost more than the step. float32 uses polynomials for exp and tanh, float64 the exact functions.
"""
# ruff: noqa: D103 - the first line of each kernel says in a comment what it writes

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from distrag.ragged import compiled

Array = np.ndarray[Any, np.dtype[Any]]
_F = np.float32


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


overload(_exp, inline="always")(_choose_exp)


@compiled
def _sigmoid_(x: Array) -> None:
    # x <- 1 / (1 + exp(-x))
    one = x.dtype.type(1)
    for j in range(x.shape[0]):
        x[j] = one / (one + _exp(-x[j]))


@compiled
def _tanh_(x: Array) -> None:
    # x <- tanh(x)
    one, two = x.dtype.type(1), x.dtype.type(2)
    for j in range(x.shape[0]):
        x[j] = two / (one + _exp(-two * x[j])) - one


@compiled
def _add_rows(out: Array, coefficients: Array, rows: Array, count: int) -> None:
    # out[:] += sum over k < count of coefficients[k] * rows[k, :len(out)]
    n = out.shape[0]
    whole = count - count % 8
    for k in range(0, whole, 8):
        c0, c1, c2, c3 = coefficients[k], coefficients[k + 1], coefficients[k + 2], coefficients[k + 3]
        c4, c5, c6, c7 = coefficients[k + 4], coefficients[k + 5], coefficients[k + 6], coefficients[k + 7]
        for j in range(n):
            low = out[j] + c0 * rows[k, j] + c1 * rows[k + 1, j] + c2 * rows[k + 2, j] + c3 * rows[k + 3, j]
            out[j] = low + c4 * rows[k + 4, j] + c5 * rows[k + 5, j] + c6 * rows[k + 6, j] + c7 * rows[k + 7, j]
    for k in range(whole, count):
        c0 = coefficients[k]
        for j in range(n):
            out[j] += c0 * rows[k, j]


# ---- GRU


@compiled
def gru_forward(gates: Array, w_hh_t: Array, b_hh: Array, offsets: Array, hidden: Array, inner: Array) -> None:
    # gates [P, 3D] in: input part of r, z, n; out: their values. hidden [P, D]: states.
    # inner [P, D]: recurrent part of n before r scales it.
    D = hidden.shape[1]
    recurrent = np.empty(3 * D, hidden.dtype)
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b], offsets[b + 1]):
            recurrent[:] = b_hh
            if i > offsets[b]:
                _add_rows(recurrent, hidden[i - 1], w_hh_t, D)
            gates[i, : 2 * D] += recurrent[: 2 * D]
            _sigmoid_(gates[i, : 2 * D])
            inner[i] = recurrent[2 * D :]
            gates[i, 2 * D :] += gates[i, :D] * inner[i]
            _tanh_(gates[i, 2 * D :])
            hidden[i] = gates[i, 2 * D :] * (hidden.dtype.type(1) - gates[i, D : 2 * D])
            if i > offsets[b]:
                hidden[i] += gates[i, D : 2 * D] * hidden[i - 1]


@compiled
def gru_backward(
    grad: Array, gates: Array, inner: Array, hidden: Array, w_hh: Array, offsets: Array, d_gates: Array, d_inner: Array, before: Array
) -> None:
    # d_gates [P, 3D]: gradient of the input part; d_inner [P, D]: of `inner`; before [P, D]: the state before each position.
    D = hidden.shape[1]
    one = hidden.dtype.type(1)
    carry = np.empty(D, hidden.dtype)
    for b in range(offsets.shape[0] - 1):
        carry[:] = 0
        for i in range(offsets[b + 1] - 1, offsets[b] - 1, -1):
            if i > offsets[b]:
                before[i] = hidden[i - 1]
            else:
                before[i] = 0
            r, z, n = gates[i, :D], gates[i, D : 2 * D], gates[i, 2 * D :]
            carry += grad[i]
            d_gates[i, 2 * D :] = carry * (one - z) * (one - n * n)
            d_gates[i, D : 2 * D] = carry * (before[i] - n) * z * (one - z)
            d_gates[i, :D] = d_gates[i, 2 * D :] * inner[i] * r * (one - r)
            d_inner[i] = d_gates[i, 2 * D :] * r
            carry *= z
            if i > offsets[b]:
                _add_rows(carry, d_gates[i, : 2 * D], w_hh, 2 * D)
                _add_rows(carry, d_inner[i], w_hh[2 * D :], D)


# ---- attention


@compiled
def _transpose(rows: Array, begin: int, end: int, column: int, out: Array) -> None:
    # out[k, j] = rows[begin + j, column + k], zeros after the last row up to a multiple of 16
    n = end - begin
    for k in range(out.shape[0]):
        for j in range(n):
            out[k, j] = rows[begin + j, column + k]
        for j in range(n, _round_up(n)):
            out[k, j] = 0


@compiled
def _round_up(n: int) -> int:
    return (n + 15) // 16 * 16


@compiled
def _maximum(x: Array, n: int) -> Any:
    top = x[0]
    for j in range(1, n):
        top = x[j] if x[j] > top else top
    return top


@compiled
def attention_forward(qkv: Array, offsets: Array, num_heads: int, causal: bool, longest: int, out: Array, log_sum: Array) -> None:
    # out [P, D] = softmax(q k / sqrt(D / H)) v inside each sequence and head; log_sum [P, H]: log of the softmax's denominator.
    D = out.shape[1]
    W = D // num_heads
    scale = out.dtype.type(1.0 / math.sqrt(W))
    keys = np.empty((W, _round_up(longest)), out.dtype)
    values = np.empty((longest, W), out.dtype)
    scores = np.empty(_round_up(longest), out.dtype)
    query = np.empty(W, out.dtype)
    result = np.empty(W, out.dtype)
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        for head in range(num_heads):
            _transpose(qkv, begin, end, D + head * W, keys)
            values[: end - begin] = qkv[begin:end, 2 * D + head * W : 2 * D + (head + 1) * W]
            for i in range(begin, end):
                n = i + 1 - begin if causal else end - begin
                wide = scores[: _round_up(n)]
                wide[:] = 0
                query[:] = qkv[i, head * W : (head + 1) * W] * scale
                _add_rows(wide, query, keys, W)
                top = _maximum(wide, n)
                for j in range(wide.shape[0]):
                    wide[j] = _exp(wide[j] - top)
                total = wide[0]
                for j in range(1, n):
                    total += wide[j]
                result[:] = 0
                _add_rows(result, wide, values, n)
                out[i, head * W : (head + 1) * W] = result / total
                log_sum[i, head] = top + math.log(total)


@compiled
def attention_backward(
    grad: Array, qkv: Array, offsets: Array, options: tuple[int, bool, int], out: Array, log_sum: Array, d_qkv: Array
) -> None:
    # d_qkv [P, 3D]; options as in attention_forward. Eight queries at a time, so that the gradients of keys and values are loaded and
    # stored once for eight.
    num_heads, causal, longest = options
    D = out.shape[1]
    W = D // num_heads
    scale = out.dtype.type(1.0 / math.sqrt(W))
    zero = out.dtype.type(0)
    keys_t = np.empty((W, _round_up(longest)), out.dtype)
    values_t = np.empty((W, _round_up(longest)), out.dtype)
    keys = np.empty((longest, W), out.dtype)
    d_keys = np.empty((longest, W), out.dtype)
    d_values = np.empty((longest, W), out.dtype)
    weights = np.empty((8, _round_up(longest)), out.dtype)
    d_scores = np.empty((8, _round_up(longest)), out.dtype)
    queries = np.empty((8, W), out.dtype)
    grads = np.empty((8, W), out.dtype)
    result = np.empty(W, out.dtype)
    column = np.empty(8, out.dtype)
    for b in range(offsets.shape[0] - 1):
        begin, end = offsets[b], offsets[b + 1]
        L = end - begin
        for head in range(num_heads):
            at = head * W
            _transpose(qkv, begin, end, D + at, keys_t)
            _transpose(qkv, begin, end, 2 * D + at, values_t)
            keys[:L] = qkv[begin:end, D + at : D + at + W]
            d_keys[:L] = 0
            d_values[:L] = 0
            for block in range(begin, end, 8):
                size = min(8, end - block)
                most = min(block + size - begin, L) if causal else L
                for r in range(size):
                    i = block + r
                    n = i + 1 - begin if causal else L
                    queries[r] = qkv[i, at : at + W] * scale
                    grads[r] = grad[i, at : at + W]
                    p, d = weights[r, : _round_up(most)], d_scores[r, : _round_up(most)]
                    p[:] = -log_sum[i, head]
                    _add_rows(p, queries[r], keys_t, W)
                    for j in range(p.shape[0]):
                        p[j] = _exp(p[j])
                    p[n:] = 0
                    shift = zero
                    for j in range(W):
                        shift -= grads[r, j] * out[i, at + j]
                    d[:] = shift
                    _add_rows(d, grads[r], values_t, W)
                    d *= p
                    result[:] = 0
                    _add_rows(result, d, keys, n)
                    d_qkv[i, at : at + W] = result * scale
                for j in range(most):
                    for r in range(size):
                        column[r] = weights[r, j]
                    _add_rows(d_values[j], column, grads, size)
                    for r in range(size):
                        column[r] = d_scores[r, j]
                    _add_rows(d_keys[j], column, queries, size)
            d_qkv[begin:end, D + at : D + at + W] = d_keys[:L]
            d_qkv[begin:end, 2 * D + at : 2 * D + at + W] = d_values[:L]


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
