"""The section `data` of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distrag.data.split import SplitConfig


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of each history.

    Args:
        path: folder of a store written by `distrag prepare`, or the address of one, such as s3://bucket/store.
        cache: folder on a disk of this machine where a store is staged; otherwise data/cache for an address, and no copy of a folder.
        max_len: longest history; the newest events are kept and what is cut is counted.
        split: how samples are divided into train, valid and test.
        history: per-position features the model sees, in this order; otherwise all.
        context: per-sample features the model sees, in this order; otherwise all.
        target: id feature that is predicted by next_item; otherwise the first one of the history.
        on_unknown: what to do with ids that prepare had to send to row 0: `count` reports how many, `error` refuses to start.
    """

    path: str = ""
    cache: str | None = None
    max_len: int = 200
    split: SplitConfig = field(default_factory=SplitConfig)
    history: list[str] | None = None
    context: list[str] | None = None
    target: str | None = None
    on_unknown: Literal["count", "error"] = "count"
