"""Where ranks tell the first one what they have written, without a collective: saves in the background never meet those of training."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch.distributed as dist

_POLL_S = 0.01


class Stopped(Exception):
    """The run ends before every rank has told."""


class Board:
    """Notes of all ranks, kept in the store through which the process group found itself.

    Every call returns at once or can be stopped: a rank that waits in it for another that has died would hold up the end of the job.

    Args:
        rank: this rank.
        size: number of ranks.
        name: of the run's saves, used by no other and no earlier process.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._store = dist.distributed_c10d._get_default_store()

    def post(self, save: str, note: dict[str, Any]) -> None:
        """Posts this rank's note of a save."""
        self._store.set(self._key(save, self.rank), json.dumps(note))

    def collect(self, save: str, stop: threading.Event) -> list[dict[str, Any]]:
        """Returns the notes of all ranks in rank order, and takes them down.

        Raises:
            Stopped: `stop` was set before all notes were there.
        """
        keys = [self._key(save, rank) for rank in range(self.size)]
        while not self._store.check(keys):
            if stop.wait(_POLL_S):
                raise Stopped
        notes = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return notes

    def _key(self, save: str, rank: int) -> str:
        return f"distrag/{self.name}/{save}/{rank}"
