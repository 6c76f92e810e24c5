"""Numbers on the command line of a bench."""

from __future__ import annotations

import argparse


def count(word: str) -> int:
    """Returns a whole number of at least 1, which may be written as `1e6`.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        value = float(word)
        whole = int(value)
    except (ValueError, OverflowError):
        value, whole = 0.5, 0
    if whole != value or whole < 1:
        raise argparse.ArgumentTypeError(f"got {word!r}, wanted a whole number of at least 1")
    return whole
