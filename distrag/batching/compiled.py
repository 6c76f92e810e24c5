"""The decorator of functions that numba compiles, and short names for the arrays they work on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

# Wider than they read: what a compiled function returns has whatever integer type its body gave it, which mypy cannot follow.
Ints: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[Any]
Column: TypeAlias = NDArray[Any]
"""One stored column: ids in the narrowest integer, numbers in float32, time in int64."""

P = ParamSpec("P")
R = TypeVar("R")

_SOURCES = hashlib.blake2b(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` compiled at its first call, kept on disk, and run without Python's global lock."""
    made = njit(cache=True, nogil=True)(function)
    # numba takes a kept function for current while its own file is unchanged, but what it calls in other files is compiled into it: after
    # an update one rank could plan by old code. So the kept ones belong to all sources of this room.
    made._cache._cache_file._source_stamp = _SOURCES
    return cast("Callable[P, R]", made)
