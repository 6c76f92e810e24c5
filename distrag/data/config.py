"""The section `data` of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distrag.data.split import SplitConfig
from distrag.data.windows import Truncate


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of each history.

    Args:
        path: folder of a store written by `distrag prepare`, or the address of one, such as s3://bucket/store.
        cache: folder on a disk of this machine where a store is staged; otherwise data/cache for an address, and no copy of a folder.
        max_len: longest history; what is cut is counted.
        truncate: which events of a longer history are kept: `newest`; `oldest`; `random_window`, which draws where the window starts in
            every epoch; `stochastic`, the newest, but a number of them drawn in every epoch that leaves a history of length L whole with
            probability (tau/L)^2. The last two are of training alone: valid and test show the newest.
        mean_cost_share: for stochastic: mean cost of a train sample over that of newest, by the encoder's a*L + b*L^2 + c; tau follows.
        split: how samples are divided into train, valid and test.
        history: per-position features the model sees, in this order; otherwise all.
        context: per-sample features the model sees, in this order; otherwise all.
        target: id feature that is predicted by next_item; otherwise the first one of the history.
        on_unknown: what to do with ids that prepare had to send to row 0: `count` reports how many, `error` refuses to start.
    """

    path: str = ""
    cache: str | None = None
    max_len: int = 200
    truncate: Truncate = "newest"
    mean_cost_share: float = 0.5
    split: SplitConfig = field(default_factory=SplitConfig)
    history: list[str] | None = None
    context: list[str] | None = None
    target: str | None = None
    on_unknown: Literal["count", "error"] = "count"
