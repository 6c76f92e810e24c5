"""`distrag submit | jobs`."""

from __future__ import annotations


def run_submit(words: list[str]) -> None:
    """Runs `distrag submit`."""
    raise NotImplementedError


def run_jobs(words: list[str]) -> None:
    """Runs `distrag jobs`."""
    raise NotImplementedError
