"""Work that may take longer than a collective waits: ranks that are done wait in turns for those that are not."""

from __future__ import annotations

import time
from collections.abc import Iterator

from distrag.world import World, agreed

_TURN_S = 5.0
"""A rank at work tells the others as often that it lives; far below any `train.timeout_s`."""


def take_turns(world: World, turns: Iterator[None]) -> None:
    """Runs all turns of every rank. A collective: every rank calls it.

    Args:
        world: the ranks.
        turns: this rank's work; it yields whenever it can be interrupted.

    Raises:
        ValueError: a turn of any rank failed; the same on every rank.
    """
    at_work = True

    def work() -> bool:
        until = time.monotonic() + _TURN_S
        while time.monotonic() < until:
            if next(turns, _END) is _END:
                return False
        return True

    while any(world.all_gather_object(at_work)):
        at_work = agreed(world, work)


_END = object()
