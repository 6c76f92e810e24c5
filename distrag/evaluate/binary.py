"""Metrics of a binary label, computed once over the samples of all ranks in sample order, and so the same at every world size."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.evaluate.catalogue import Ranks
from distrag.problem import problem

Floats = NDArray[np.float64]
Metrics = dict[str, int | float | None]


class BinaryEvaluator:
    """Collects this rank's scores and gives the metrics of all ranks' samples, each sample once.

    Dummies (sample number -1) are dropped, and so is a sample number that came before: a repeated sample counts once. Every rank ends with
    all samples, 40 bytes each.

    Args:
        world: the ranks.
        logits: scores are logits; otherwise they are probabilities.
    """

    def __init__(self, world: Ranks, *, logits: bool = True) -> None:
        self.world, self.logits = world, logits
        self._numbers = [np.zeros((3, 0))]
        self._keys = [np.zeros((2, 0), np.int64)]

    def add(
        self, samples: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor | None = None
    ) -> None:
        """Takes one local batch; communicates nothing, so ranks may call it unequally often.

        Args:
            samples: int64 `[B]`, sample numbers; -1 for a dummy.
            scores: float `[B]` or `[B, 1]`.
            labels: `[B]`, 0 or 1, any type.
            weights: float `[B]`, sample weights.
            groups: int64 `[B]`, for the group AUC; None puts all in one group.
        """
        numbers = torch.stack([part.detach().reshape(-1).to("cpu", torch.float64) for part in (scores, labels, weights)])
        owner = torch.zeros_like(samples) if groups is None else groups
        self._numbers.append(numbers.numpy())
        self._keys.append(torch.stack([samples.to("cpu", torch.int64), owner.to("cpu", torch.int64)]).numpy())

    def result(self) -> Metrics:
        """Returns the metrics of `binary_metrics` over all ranks. A collective: all ranks call it."""
        numbers, keys = self._gather(np.concatenate(self._numbers, 1)), self._gather(np.concatenate(self._keys, 1))
        samples, first = np.unique(keys[0], return_index=True)
        first = first[samples >= 0]
        scores, labels, weights = numbers[:, first]
        return binary_metrics(scores, labels, weights, keys[1, first], logits=self.logits)

    def _gather(self, columns: NDArray[np.generic]) -> NDArray[np.generic]:
        device = self.world.device
        size = torch.zeros(self.world.size, dtype=torch.int64, device=device)
        size[self.world.rank] = columns.shape[1]
        sizes = [int(n) for n in self.world.all_reduce_sum(size).tolist()]
        own = torch.from_numpy(np.ascontiguousarray(columns.T)).to(device)
        return torch.cat(self.world.all_gather_uneven(own, sizes)).cpu().numpy().T


def binary_metrics(
    scores: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64] | None = None, *, logits: bool = True
) -> Metrics:
    """Returns counts, means, log loss, NE, calibration, AUC and group AUC, in float64 and safe for JSON.

    A sample whose score is NaN is counted in `num_nan` and left out of everything but `count`. Weighted means are 0 when the weights sum
    to 0. None stands for what is undefined: `ne` and `auc` with one class only, `calibration` without a positive, `gauc` and `gauc_mean`
    when no group holds both classes, and any infinite value. A sample of weight 0 counts as absent: a class that has no other is absent
    too.

    Args:
        scores: float64 `[N]`, logits or probabilities.
        labels: float64 `[N]`, 0 or 1.
        weights: float64 `[N]`, not negative.
        groups: int64 `[N]`; None puts all in one group.
        logits: what the scores are.

    Returns:
        `count`, `num_nan`, `sum_weights`, `positive_rate`, `mean_score` (probability), `log_loss` (nats), `ne` (log loss over the entropy
        of the positive rate), `calibration` (sum of probabilities over sum of labels), `auc` (ties count one half), `gauc` (mean weighted
        by the groups' sum of weights), `gauc_mean` (plain mean), `num_groups`, `num_groups_used` (both classes present).

    Raises:
        ValueError: a label is neither 0 nor 1, a weight is negative or not finite, or a probability lies outside 0 .. 1.
    """
    count, good = len(scores), ~np.isnan(scores)
    groups = np.zeros(count, np.int64) if groups is None else groups
    _check(scores[good], labels, weights, logits)
    scores, labels, weights, groups = scores[good], labels[good], weights[good], groups[good]
    chance = _sigmoid(scores) if logits else scores
    total, positive = float(weights.sum()), float((weights * labels).sum())
    loss = _mean(_log_loss(scores, labels, logits), weights, total)
    rate, predicted = positive / total if total else 0.0, float((weights * chance).sum())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else 0.0
    out: Metrics = {"count": count, "num_nan": count - len(scores), "sum_weights": total, "positive_rate": rate}
    out |= {"mean_score": predicted / total if total else 0.0, "log_loss": loss, "ne": loss / entropy if entropy else None}
    out |= {"calibration": predicted / positive if positive else None, "auc": _auc(scores, labels, weights)}
    out |= _group_auc(scores, labels, weights, groups)
    return {name: value if value is None or math.isfinite(value) else None for name, value in out.items()}


def _check(scores: Floats, labels: Floats, weights: Floats, logits: bool) -> None:
    todo = "mend the column in the source and run `distrag prepare` again"
    bad = labels[(labels != 0) & (labels != 1)]
    if len(bad):
        raise problem("A label is not binary", got=bad[:5].tolist(), wanted="0 or 1", where="labels of evaluate", todo=todo)
    bad = weights[~(np.isfinite(weights) & (weights >= 0))]
    if len(bad):
        raise problem("A weight is no weight", got=bad[:5].tolist(), wanted="finite, >= 0", where="weights of evaluate", todo=todo)
    bad = scores[(scores < 0) | (scores > 1)]
    if len(bad) and not logits:
        todo = "pass logits=True when the scores are logits"
        raise problem("A score is no probability", got=bad[:5].tolist(), wanted="0 .. 1", where="scores of evaluate", todo=todo)


def _sigmoid(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _log_loss(scores: Floats, labels: Floats, logits: bool) -> Floats:
    if logits:
        # softplus of the logit on the wrong side: exact where a float32 sigmoid has long been 1.
        wrong = np.where(labels == 1, -scores, scores)
        return np.maximum(wrong, 0.0) + np.log1p(np.exp(-np.abs(wrong)))
    with np.errstate(divide="ignore"):
        return -np.log(np.where(labels == 1, scores, 1.0 - scores))


def _mean(values: Floats, weights: Floats, total: float) -> float:
    used = weights > 0  # an infinite loss of weight 0 weighs nothing
    return float((values[used] * weights[used]).sum() / total) if total else 0.0


def _auc(scores: Floats, labels: Floats, weights: Floats) -> float | None:
    areas, pairs, _ = _areas(scores, labels, weights, np.zeros(len(scores), np.int64))
    return float(areas[0] / pairs[0]) if len(pairs) and pairs[0] > 0 else None


def _group_auc(scores: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]) -> Metrics:
    areas, pairs, sizes = _areas(scores, labels, weights, groups)
    used = pairs > 0
    auc, size = areas[used] / pairs[used], sizes[used]
    some = bool(used.any())
    weighted, plain = (float((auc * size).sum() / size.sum()), float(auc.mean())) if some else (None, None)
    return {"gauc": weighted, "gauc_mean": plain, "num_groups": len(pairs), "num_groups_used": len(auc)}


def _areas(scores: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Returns for each group `[G]`: weight of rightly ordered pairs (ties one half), weight of all pairs, weight of its samples."""
    used = weights > 0
    scores, labels, weights, groups = scores[used], labels[used], weights[used], groups[used]
    if not len(scores):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    order = np.lexsort((scores, groups))
    scores, groups = scores[order], groups[order]
    positive, negative = (weights * labels)[order], (weights * (1 - labels))[order]
    new_group = np.append(True, groups[1:] != groups[:-1])
    levels = np.flatnonzero(new_group | np.append(True, scores[1:] != scores[:-1]))
    level_pos, level_neg = np.add.reduceat(positive, levels), np.add.reduceat(negative, levels)
    starts = np.flatnonzero(new_group[levels])
    below = np.cumsum(level_neg) - level_neg
    below -= np.repeat(below[starts], np.diff(np.append(starts, len(levels))))
    areas = np.add.reduceat(level_pos * (below + 0.5 * level_neg), starts)
    all_pos, all_neg = np.add.reduceat(level_pos, starts), np.add.reduceat(level_neg, starts)
    return areas, all_pos * all_neg, all_pos + all_neg
