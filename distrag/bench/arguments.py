"""Numbers and files on the command line of a bench, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable


def count(word: str) -> int:
    """Returns a whole number from 1 to 2^31 - 1, which may be written as `1e6`.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        value = float(word)
        whole = int(value)
    except (ValueError, OverflowError):
        value, whole = 0.5, 0
    if whole != value or not 1 <= whole < 2**31:
        raise argparse.ArgumentTypeError(f"got {word!r:.60}, wanted a whole number of at least 1 and below 2^31")
    return whole


def seed(word: str) -> int:
    """Returns a seed: a whole number from 0 on.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    if not (word.isascii() and word.isdigit() and len(word) < 10):
        raise argparse.ArgumentTypeError(f"got {word!r}, wanted a whole number from 0 to 999,999,999")
    return int(word)


def real(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Returns a reader of numbers from `low` to below `high`."""

    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (low <= value < high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(
                f"got {word!r}, wanted a number from {low:g}" + (f" to below {high:g}" if high < math.inf else "")
            )
        return value

    return read


def report_file(word: str) -> str:
    """Returns the name of a file that can be written.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or its folder is missing or not writable.
    """
    folder = os.path.dirname(word) or "."
    if not word or os.path.isdir(word) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {word!r}, wanted a file in a folder that is there and can be written")
    return word
