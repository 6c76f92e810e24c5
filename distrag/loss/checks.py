"""Refusals of loss options that cannot work, as five-part errors."""

from __future__ import annotations

from distrag.problem import problem


def check_positive(got: float, key: str) -> None:
    """Refuses an option that is not above 0.

    Raises:
        ValueError: naming the config key.
    """
    if not got > 0:
        raise problem("A loss option must be positive", got=got, wanted="above 0", where=key, todo=f"set {key} to a number above 0")
