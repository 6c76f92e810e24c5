"""Histories with long-tailed lengths and a pattern that both tasks can learn; the same for the same config, on every machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from distrag.data.files import Batch, Rows
from distrag.data.flatten import column_type
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_START = 1_600_000_000
_BLOCK = 1 << 14


@dataclass(frozen=True)
class SyntheticConfig:
    """Size and shape of the synthetic data.

    Args:
        num_samples: rows.
        num_items: items that can occur.
        seed: of everything that is drawn.
        mean_len: mean length of the rows that are not empty, before cutting at `max_len`.
        sigma: standard deviation of the logarithm of the length; 0 makes all rows equally long.
        share_empty: share of rows without any event.
        max_len: longest row.
        num_clusters: groups of items; an event of group g is followed by one of group g+1 unless the user jumps.
        share_jumps: share of events that jump to a random group: what nobody can predict.
    """

    num_samples: int = 10_000
    num_items: int = 1_000
    seed: int = 0
    mean_len: float = 30.0
    sigma: float = 1.1
    share_empty: float = 0.02
    max_len: int = 1_000
    num_clusters: int = 20
    share_jumps: float = 0.2


def synthetic_rows(config: SyntheticConfig) -> Rows:
    """Returns the rows of a synthetic data set, drawn block by block while they are read.

    Columns: user_id, item_id, dwell, timestamp (lists) and segment, age, requested_at, label (one a row). Items form `num_clusters`
    groups and a history walks through them in a circle, so the next group is known but for the jumps; within a group low item numbers are
    frequent. The chance of label 1 grows with the share of events in the first half of the groups, shifted by the segment.

    Raises:
        ValueError: when a size or a share is out of range.
    """
    _check(config)

    def batches(columns: Sequence[str]) -> Iterator[tuple[str, int, Batch]]:
        for first in range(0, config.num_samples, _BLOCK):
            block = _block(config, first, min(_BLOCK, config.num_samples - first))
            yield "synthetic", first, {name: block[name] for name in columns}

    types = {name: column_type(array.type) for name, array in _block(config, 0, 1).items()}
    return Rows(types, batches, {"synthetic": asdict(config), "version": 1})


def _block(config: SyntheticConfig, first: int, count: int) -> dict[str, pa.Array]:
    rng = np.random.default_rng([config.seed, first])
    lengths = _lengths(config, rng, count)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    groups = _groups(config, rng, offsets)
    segment = rng.integers(0, 4, count, dtype=np.int32)
    elapsed = np.concatenate([np.zeros(1, np.int64), np.cumsum(rng.integers(1, 20_000, len(groups), dtype=np.int32), dtype=np.int64)])
    lists = {
        "item_id": _items(config, rng, groups),
        "dwell": rng.standard_exponential(len(groups), dtype=np.float32) * 30,
        "timestamp": _START + elapsed[1:] - np.repeat(elapsed[offsets[:-1]], lengths),
    }
    columns = {name: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)) for name, values in lists.items()}
    return columns | {
        "user_id": pa.array(np.arange(first, first + count)),
        "segment": pa.array(segment),
        "age": pa.array(rng.integers(16, 80, count).astype(np.float32)),
        "requested_at": pa.array(_START + elapsed[offsets[1:]] - elapsed[offsets[:-1]] + rng.integers(1, 86_400, count)),
        "label": pa.array(_labels(config, rng, groups, offsets, segment)),
    }


def _lengths(config: SyntheticConfig, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    drawn = rng.lognormal(np.log(config.mean_len) - config.sigma**2 / 2, config.sigma, count)
    lengths = np.clip(np.rint(drawn), 1, config.max_len).astype(np.int64)
    lengths[rng.random(count) < config.share_empty] = 0
    return lengths


def _groups(config: SyntheticConfig, rng: np.random.Generator, offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    count = int(offsets[-1])
    jump = rng.random(count, dtype=np.float32) < config.share_jumps
    jump[offsets[:-1][np.diff(offsets) > 0]] = True
    index = np.arange(count, dtype=np.int32)
    since = np.maximum.accumulate(np.where(jump, index, np.int32(0)))
    start = rng.integers(0, config.num_clusters, count, dtype=np.int32)
    groups: NDArray[np.int32] = (start[since] + index - since) % np.int32(config.num_clusters)
    return groups


def _items(config: SyntheticConfig, rng: np.random.Generator, groups: NDArray[np.int32]) -> NDArray[np.int32]:
    # Group g holds the items g, g + C, g + 2C, ...; the square of a uniform number makes the first of them frequent.
    sizes = (config.num_items - groups + config.num_clusters - 1) // np.int32(config.num_clusters)
    rank = (np.square(rng.random(len(groups), dtype=np.float32)) * sizes).astype(np.int32)
    items: NDArray[np.int32] = groups + np.int32(config.num_clusters) * np.minimum(rank, sizes - 1)
    return items


def _labels(
    config: SyntheticConfig, rng: np.random.Generator, groups: NDArray[np.int32], offsets: NDArray[np.int64], segment: NDArray[np.int32]
) -> NDArray[np.bool_]:
    liked = np.concatenate([np.zeros(1, np.int64), np.cumsum(groups < config.num_clusters // 2)])
    share = (liked[offsets[1:]] - liked[offsets[:-1]]) / np.maximum(np.diff(offsets), 1)
    logit = 8 * (share - 0.5) + np.array([-1.0, -0.3, 0.3, 1.0])[segment]
    labels: NDArray[np.bool_] = rng.random(len(share)) < 1 / (1 + np.exp(-logit))
    return labels


_MOST = 2**31 - 1


def _check(config: SyntheticConfig) -> None:
    wrong = {
        "num_samples": not 1 <= config.num_samples <= _MOST,
        "num_clusters": config.num_clusters < 1,
        "num_items": not config.num_clusters <= config.num_items <= _MOST,
        "seed": not 0 <= config.seed <= _MOST,
        "mean_len": not config.mean_len > 0,
        "sigma": not config.sigma >= 0,
        "share_empty": not 0 <= config.share_empty <= 1,
        "max_len": config.max_len < 1,
        "share_jumps": not 0 <= config.share_jumps <= 1,
    }
    for name, bad in wrong.items():
        if bad:
            wanted = "sizes from 1 to 2^31 - 1, seeds from 0, shares from 0 to 1, at least one item a group"
            raise problem(
                "Synthetic data of this shape cannot be made",
                got=getattr(config, name),
                wanted=wanted,
                where=f"synthetic.{name}",
                todo="mend it",
            )
