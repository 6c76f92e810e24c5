"""What the steps of a plan are made of: tokens, samples and cost of every rank, padding, and how mixed the lengths of a step are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrag.batching.plan import EpochPlan
from distrag.encoder.padding import Padding, count_cells

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

BUCKET_STEPS = (1, 2, 4, 16, 64)
STEPS, SCAN_STEPS, SCAN_RANKS = 256, 64, 16  # most that are looked at, spread evenly
MOST_SHARES = 1 << 22  # steps times ranks, which are held at once
CLASSES = 16
LITTLE_PADDING = 1 / 3  # then a half as much again is computed


@dataclass(frozen=True)
class Walk:
    """Every rank in the steps that were looked at.

    Attributes:
        steps: their numbers, int64 `[S]`.
        tokens: int64 `[S, W]`.
        samples: int64 `[S, W]`.
        costs: float64 `[S, W]`.
    """

    steps: Ints
    tokens: Ints
    samples: Ints
    costs: Floats

    def numbers(self) -> dict[str, float]:
        """Returns tokens and samples a rank, and max / mean over ranks of cost and of tokens, in numbers over the steps."""
        imbalance, uneven = max_over_mean(self.costs), max_over_mean(self.tokens.astype(np.float64))
        return {
            "steps_looked_at": len(self.steps),
            "rank_tokens_min": int(self.tokens.min(initial=2**62)) if self.tokens.size else 0,
            "rank_tokens_mean": float(self.tokens.mean()) if self.tokens.size else 0.0,
            "rank_tokens_max": int(self.tokens.max(initial=0)),
            "rank_samples_min": int(self.samples.min(initial=2**62)) if self.samples.size else 0,
            "rank_samples_mean": float(self.samples.mean()) if self.samples.size else 0.0,
            "rank_samples_max": int(self.samples.max(initial=0)),
            "dummy_share": float((self.samples == 0).mean()) if self.samples.size else 0.0,
            "imbalance_mean": float(imbalance.mean()),
            "imbalance_p99": float(np.quantile(imbalance, 0.99)),
            "imbalance_max": float(imbalance.max()),
            "token_imbalance_mean": float(uneven.mean()),
            "token_imbalance_p99": float(np.quantile(uneven, 0.99)),
        }


def max_over_mean(values: Floats) -> Floats:
    """Returns the largest over the mean of each row of `[S, W]`, float64 `[S]`; 1 where all are 0, and where there is no row."""
    if not len(values):
        return np.ones(1)
    mean = values.mean(1)
    return np.where(mean > 0, values.max(1) / np.where(mean > 0, mean, 1.0), 1.0)


def spread(size: int, most: int) -> Ints:
    """Returns at most `most` of the numbers 0 .. size-1, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64)) if size else np.zeros(0, np.int64)


def spread_runs(size: int, most: int, run: int = 8) -> Ints:
    """Returns at most `most` of the numbers 0 .. size-1 in runs of neighbours that are spread: of steps, since a pool of them costs little
    more to plan than one.
    """
    if size <= most:
        return np.arange(size)
    run = min(run, most)
    starts = np.linspace(0, size - run, most // run).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(run))


def walk_plan(plan: EpochPlan, most: int = STEPS) -> Walk:
    """Returns tokens, samples and costs of every rank in at most `most` steps, fewer for very many ranks."""
    W = plan.world_size
    steps = spread_runs(plan.num_steps, max(8, min(most, MOST_SHARES // W)))
    tokens, samples, costs = np.zeros((len(steps), W), np.int64), np.zeros((len(steps), W), np.int64), np.zeros((len(steps), W))
    for i, step in enumerate(steps.tolist()):
        tokens[i], samples[i], costs[i] = plan.rank_tokens(step), plan.rank_samples(step), plan.rank_costs(step)
    return Walk(steps, tokens, samples, costs)


def padding_shares(plan: EpochPlan, lengths: Ints, paddings: Mapping[str, Padding]) -> dict[str, float | None]:
    """Returns which share of the computed positions is padding, over at most 64 steps and 16 ranks of each.

    Args:
        plan: the plan.
        lengths: of the samples.
        paddings: names, and how each pads; None comes out for `unknown`.
    """
    kept, cells = 0, dict.fromkeys(paddings, 0)
    for step in spread_runs(plan.num_steps, SCAN_STEPS).tolist():
        for rank in spread(plan.world_size, SCAN_RANKS).tolist():
            own = lengths[plan.samples(step, rank)]
            kept += int(own.sum())
            for name, padding in paddings.items():
                cells[name] += count_cells(own, padding)
    shares = {name: 1.0 - kept / count if count else 0.0 for name, count in cells.items()}
    return {name: None if paddings[name] == "unknown" else share for name, share in shares.items()}


class Entropy:
    """How mixed the lengths of a step are, 1 being as mixed as the whole view.

    The lengths of the view are cut at their quantiles into at most 16 classes (equal lengths stay together). The entropy of a step is
    that of the histogram of its samples over these classes, `-sum p log p`, divided by the entropy of the whole view's histogram; what is
    returned is the mean over steps. bucket_steps 1 gives almost 1, and less where a step holds few samples: 32 samples can fill 16 classes
    only roughly. Steps of one length each give 0. A view of one length has nothing to mix, and counts as 1.

    Args:
        lengths: of the view.
    """

    def __init__(self, lengths: Ints) -> None:
        edges = np.unique(np.quantile(lengths, np.arange(1, CLASSES) / CLASSES, method="higher")) if len(lengths) else np.zeros(0)
        self._class_of: Ints = np.searchsorted(edges, lengths, side="left").astype(np.int64)
        self._whole = _entropy(self._class_of)

    def of(self, steps: Iterable[Ints]) -> float:
        """Returns the mean over the steps.

        Args:
            steps: sample numbers of each step, over all ranks.
        """
        found = [_entropy(self._class_of[samples]) for samples in steps]
        return float(np.mean(found)) / self._whole if found and self._whole > 0.0 else 1.0


def _entropy(classes: Ints) -> float:
    counts = np.bincount(classes)
    shares = counts[counts > 0] / max(1, len(classes))
    return float(-(shares * np.log(shares)).sum())


def scan_buckets(
    make: Callable[[int], EpochPlan], lengths: Ints, paddings: Mapping[str, Padding], chosen: int
) -> list[dict[str, float | int | None]]:
    """Returns padding shares and entropy of the composition for several `bucket_steps`.

    Args:
        make: the plan of these lengths for a `bucket_steps`.
        lengths: of the samples that `make` plans.
        paddings: as for `padding_shares`.
        chosen: of the config; it is looked at too.
    """
    entropy = Entropy(lengths)
    rows: list[dict[str, float | int | None]] = []
    for bucket_steps in sorted({*BUCKET_STEPS, chosen}):
        plan = make(bucket_steps)
        mixed = entropy.of(plan.step_samples(step) for step in spread_runs(plan.num_steps, SCAN_STEPS).tolist())
        rows.append({"bucket_steps": bucket_steps, "entropy": mixed, **padding_shares(plan, lengths, paddings)})
    return rows


def recommend(rows: Sequence[Mapping[str, Any]], name: str, padding: Padding) -> tuple[int, str]:
    """Returns the `bucket_steps` to take, and why: 1 where nothing pads, else the smallest that leaves little padding.

    Args:
        rows: from `scan_buckets`.
        name: of the padding among the rows.
        padding: how the encoder pads.
    """
    if padding == "none":
        return 1, "the encoder pads nothing, so mixing all lengths in each step costs nothing"
    if padding == "unknown":
        return 1, "the encoder does not say whether it pads"
    good = next((row for row in rows if row[name] <= LITTLE_PADDING), None)
    row = good or min(rows, key=lambda row: row[name])
    words = f"{row[name]:.0%} padding inside, entropy {row['entropy']:.2f}"
    if row["bucket_steps"] > 1:
        words += f", where 1 has {rows[0][name]:.0%} and {rows[0]['entropy']:.2f}"
    return int(row["bucket_steps"]), words
