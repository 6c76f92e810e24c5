"""Least squares whose coefficients may not be negative, for the few columns of a cost."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def solve_nonnegative(matrix: Floats, values: Floats) -> Floats:
    """Returns the x >= 0 with the smallest |matrix x - values|, float64 `[k]`.

    Exact: the best x is the plain least-squares answer on the columns that it uses, so trying every set of columns finds it.
    That is 2^k small solves, so it is for a handful of columns.

    Args:
        matrix: `[n, k]`.
        values: `[n]`.
    """
    k = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0  # columns of seconds and of squared lengths differ by many powers of ten
    columns = matrix / scale
    best, smallest = np.zeros(k), float(values @ values)
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, values, rcond=None)[0]
            rest = part @ found - values
            if found.min() >= 0.0 and float(rest @ rest) < smallest:
                best, smallest = np.zeros(k), float(rest @ rest)
                best[list(chosen)] = found
    coefficients: Floats = best / scale
    return coefficients
