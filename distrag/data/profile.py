"""What the lengths and the vocabularies of a store mean for a run: quantiles, waste of padding, cost of cutting, suggested settings."""

from __future__ import annotations

import json as js
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distrag.data.policies import MEAN_COST_SHARE, PolicyCut, policy_cuts
from distrag.data.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from distrag.data.schema import Feature
    from distrag.data.store import Store

QUANTILES = {"p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
MAX_LENS = (10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Cut:
    """What a `max_len` leaves out.

    Attributes:
        max_len: newest events kept of each history.
        share_positions: share of all positions that are older than these.
        share_samples: share of samples that lose at least one position.
    """

    max_len: int
    share_positions: float
    share_samples: float


@dataclass(frozen=True)
class Suggestion:
    """Settings to start from.

    Attributes:
        max_len: 99 % of the samples stay whole; a multiple of 8.
        buckets: upper bounds of length buckets, doubling, so that at most about half of a padded bucket is padding.
        max_tokens: tokens of a rank's batch that hold about 256 samples, and at least four of the longest.
    """

    max_len: int
    buckets: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class LengthProfile:
    """Lengths of the rows of a store in numbers.

    Attributes:
        num_samples: rows.
        num_positions: positions over all rows.
        mean: positions a row.
        share_empty: share of rows without a position.
        quantiles: of the lengths, NumPy's linear interpolation rounded to whole positions.
        padded_waste: if every history is cut to its newest P positions and padded to P, the share of the `N x P` rectangle that is padding,
            for P at the quantile named; 0 when P is 0.
        cuts: what each `max_len` would leave out.
        policies: what each way to cut keeps at the suggested `max_len`.
        suggestion: settings to start from.
    """

    num_samples: int
    num_positions: int
    mean: float
    share_empty: float
    quantiles: dict[str, int]
    padded_waste: dict[str, float]
    cuts: tuple[Cut, ...]
    policies: tuple[PolicyCut, ...]
    suggestion: Suggestion


def length_profile(store: Store, max_lens: Sequence[int] = MAX_LENS) -> LengthProfile:
    """Returns the profile of a store's row lengths, from one pass over its offsets.

    Args:
        store: opened store.
        max_lens: lengths to cut at; those from the longest row on cut nothing and are left out but for the first.
    """
    lengths = store.lengths
    counts = np.bincount(lengths)
    quantiles = {name: round(float(np.percentile(lengths, q))) for name, q in QUANTILES.items()}
    longest = quantiles["max"]
    asked = [m for i, m in enumerate(sorted(max_lens)) if i == 0 or sorted(max_lens)[i - 1] < longest]
    suggestion = _suggest(counts, quantiles["p99"])
    return LengthProfile(
        num_samples=len(lengths),
        num_positions=store.num_positions,
        mean=store.num_positions / len(lengths),
        share_empty=float(counts[0] / len(lengths)),
        quantiles=quantiles,
        padded_waste={name: _waste(counts, quantiles[name]) for name in ("p95", "p99", "max")},
        cuts=tuple(_cut(counts, m) for m in asked),
        policies=policy_cuts(lengths, suggestion.max_len),
        suggestion=suggestion,
    )


def store_stats(store: Store, max_lens: Sequence[int] = MAX_LENS) -> dict[str, Any]:
    """Returns everything `distrag stats --json` prints, as plain values."""
    schema = store.schema
    features = [
        _feature_stats(store, place, f) for place, group in (("history", schema.history), ("context", schema.context)) for f in group
    ]
    tables = [{**asdict(table), "features": list(table.features)} for table in schema.tables]
    label = {"name": schema.label, "mean": float(np.mean(store.label, dtype=np.float64))} if store.label is not None else None
    facts = {"path": str(store.path), "content_hash": store.content_hash, "lengths": asdict(length_profile(store, max_lens))}
    return {**facts, "features": features, "tables": tables, "label": label}


def stats(path: str | Path, json: bool = False) -> None:
    """Prints what is in a store, as tables or as one JSON object.

    Args:
        path: folder written by `distrag prepare`.
        json: print JSON instead of tables.
    """
    found = store_stats(open_store(path))
    if json:
        print(js.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)


def _kept(counts: NDArray[np.int64], width: int) -> int:
    return int((np.minimum(np.arange(len(counts)), width) * counts).sum())


def _waste(counts: NDArray[np.int64], width: int) -> float:
    return 1 - _kept(counts, width) / (int(counts.sum()) * width) if width else 0.0


def _cut(counts: NDArray[np.int64], max_len: int) -> Cut:
    share = 1 - _kept(counts, max_len) / max(_kept(counts, len(counts)), 1) if max_len < len(counts) else 0.0
    return Cut(max_len, share, float(counts[max_len + 1 :].sum() / counts.sum()))


def _suggest(counts: NDArray[np.int64], p99: int) -> Suggestion:
    max_len = max(8, -(-p99 // 8) * 8)
    buckets = [8]
    while buckets[-1] * 2 < max_len:
        buckets.append(buckets[-1] * 2)
    mean = _kept(counts, max_len) / int(counts.sum())
    tokens = max(4 * max_len, 256 * mean)
    return Suggestion(max_len, tuple(dict.fromkeys([*buckets, max_len])), int(-(-tokens // 256) * 256))


def _feature_stats(store: Store, place: str, f: Feature) -> dict[str, Any]:
    size = store.num_positions if place == "history" else store.num_samples
    return {"place": place, **asdict(f), "share_unknown": (f.num_unknown + f.num_null) / max(size, 1)}


def _print(found: dict[str, Any]) -> None:
    lengths, advice = found["lengths"], found["lengths"]["suggestion"]
    print(f"{found['path']}: {lengths['num_samples']:,} samples, {lengths['num_positions']:,} positions, hash {found['content_hash']}")
    quantiles = {**{name: f"{value:,}" for name, value in lengths["quantiles"].items()}, "mean": f"{lengths['mean']:.1f}"}
    _print_table("lengths", [*quantiles, "empty"], [[*quantiles.values(), f"{lengths['share_empty']:.2%}"]])
    waste = lengths["padded_waste"]
    _print_table("share of padding if all histories were padded to", list(waste), [[f"{share:.1%}" for share in waste.values()]])
    cuts = [[f"{c['max_len']:,}", f"{c['share_positions']:.2%}", f"{c['share_samples']:.2%}"] for c in lengths["cuts"]]
    _print_table("cut by max_len", ["max_len", "positions", "samples"], cuts)
    _print_policies(lengths["policies"], advice["max_len"])
    columns = ["name", "place", "kind", "dtype", "table", "num_unknown", "num_null"]
    _print_table("features", columns, [[_cell(f[c]) for c in columns] for f in found["features"]])
    tables = [[t["name"], t["kind"], f"{t['num_rows']:,}", ", ".join(t["features"]), f"{t['num_unknown']:,}"] for t in found["tables"]]
    _print_table("tables", ["name", "kind", "num_rows", "features", "num_unknown"], tables)
    print(f"to start from: data.max_len {advice['max_len']}, batching.max_tokens {advice['max_tokens']}, buckets {list(advice['buckets'])}")


def _print_policies(policies: list[dict[str, Any]], max_len: int) -> None:
    rows = []
    for p in policies:
        name = f"{p['truncate']}, half of {p['cost']}" if p["cost"] else p["truncate"]
        tau = "" if p["tau"] is None else f"{p['tau']:.1f}"
        shares = [f"{p[key]:.2%}" for key in ("share_cut", "linear_share", "quadratic_share")]
        rows.append([name, f"{p['num_kept']:,.0f}", f"{p['num_cut']:,.0f}", *shares, tau])
    title = f"cut by data.truncate at max_len {max_len} (stochastic: expected, data.mean_cost_share {MEAN_COST_SHARE})"
    _print_table(title, ["truncate", "kept", "cut", "share cut", "cost of L", "cost of L^2", "tau"], rows)


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if rows and rows[0][i][:1].isdigit() else "left")
    for row in rows:
        table.add_row(*row)
    print(f"\n{title}")
    console = Console()
    Console(width=None if console.is_terminal else 140).print(table)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
