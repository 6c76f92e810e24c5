"""Binary metrics are those of all samples together, each once, at every world size."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from distrag.evaluate import BinaryEvaluator, binary_metrics
from distrag.world import World, start_world
from tests.ranks import run_ranks

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def _metrics(
    scores: list[float], labels: list[float], weights: list[float] | None = None, groups: list[int] | None = None, logits: bool = False
) -> dict[str, int | float | None]:
    owner = None if groups is None else np.array(groups)
    return binary_metrics(np.array(scores, float), np.array(labels, float), np.array(weights or [1.0] * len(scores)), owner, logits=logits)


def _add(evaluator: BinaryEvaluator, samples: list[int], scores: list[float], labels: list[float]) -> None:
    weights = torch.tensor([float(s >= 0) for s in samples])
    evaluator.add(torch.tensor(samples, dtype=torch.int64), torch.tensor(scores), torch.tensor(labels), weights)


def test_auc_is_that_of_all_ranks_and_not_the_mean_of_their_aucs() -> None:
    def auc() -> object:
        world = start_world("cpu")
        evaluator = BinaryEvaluator(world, logits=False)
        _add(evaluator, [2 * world.rank, 2 * world.rank + 1], [[0.9, 0.8], [0.3, 0.2]][world.rank], [1.0, 0.0])
        return evaluator.result()["auc"]

    assert run_ranks(auc, 2) == [0.75, 0.75]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_five_samples_count_five_although_ranks_are_evened_out_with_dummies_and_repeats(world_size: int) -> None:
    scores, labels = [0.1, 0.2, 0.3, 0.4, 0.5], [1.0, 0.0, 0.0, 0.0, 0.0]

    def evaluate() -> tuple[object, ...]:
        world = start_world("cpu")
        evaluator = BinaryEvaluator(world, logits=False)
        own = [*range(world.rank, 5, world.size), -1, world.rank]
        _add(evaluator, own, [scores[i] for i in own], [labels[i] for i in own])
        out = evaluator.result()
        return out["count"], out["positive_rate"], out["mean_score"]

    alone = run_ranks(evaluate, 1)[0]
    assert alone == pytest.approx((5, 0.2, 0.3), abs=1e-8)
    assert run_ranks(evaluate, world_size) == [alone] * world_size


def test_two_samples_on_four_ranks_count_two_and_an_empty_world_counts_none() -> None:
    def evaluate() -> tuple[object, object]:
        world = start_world("cpu")
        few, none = BinaryEvaluator(world), BinaryEvaluator(world)
        _add(few, [world.rank if world.rank < 2 else -1], [0.5], [float(world.rank % 2)])
        return few.result()["count"], none.result()["count"]

    assert run_ranks(evaluate, 4) == [(2, 0)] * 4


def test_every_metric_is_the_same_to_the_last_bit_at_every_world_size() -> None:
    rng = np.random.default_rng(0)
    scores, labels = torch.from_numpy(rng.normal(size=300).round(1)).float(), torch.from_numpy(rng.integers(0, 2, 300))
    weights, groups = torch.from_numpy(rng.random(300)).float(), torch.from_numpy(rng.integers(0, 40, 300))

    def evaluate() -> object:
        world = start_world("cpu")
        evaluator = BinaryEvaluator(world)
        shares = torch.randperm(300, generator=torch.Generator().manual_seed(world.size)).tensor_split(2 * world.size)
        for own in shares[world.rank :: world.size]:
            evaluator.add(own, scores[own][:, None], labels[own], weights[own], groups[own])
        return evaluator.result()

    results = [result for size in (1, 2, 4) for result in run_ranks(evaluate, size)]
    assert all(result == results[0] for result in results)


def test_auc_counts_ties_one_half_in_any_order() -> None:
    for labels in ([1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]):
        assert _metrics([0.5] * 4, labels)["auc"] == 0.5
    assert _metrics([0.2, 0.5, 0.5, 0.9], [0, 0, 1, 1])["auc"] == 0.875


def _slow_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float | None:
    positive, negative = ([(s, w) for s, y, w in zip(scores, labels, weights, strict=True) if y == wanted] for wanted in (1, 0))
    pairs = [(wi * wj, si, sj) for si, wi in positive for sj, wj in negative]
    total = sum(w for w, _, _ in pairs)
    return sum(w * ((a > b) + 0.5 * (a == b)) for w, a, b in pairs) / total if total else None


def test_auc_and_group_auc_equal_all_pairs_one_by_one() -> None:
    rng = np.random.default_rng(5)
    scores, labels, weights = rng.integers((-3, 0, 0), (4, 2, 4), (120, 3)).astype(float).T
    groups = rng.integers(0, 50, 120)
    out = binary_metrics(scores, labels, weights, groups)
    each = {g: (_slow_auc(*(v[groups == g] for v in (scores, labels, weights))), weights[groups == g].sum()) for g in np.unique(groups)}
    used = [(auc, w) for auc, w in each.values() if auc is not None]
    assert out["auc"] == pytest.approx(_slow_auc(scores, labels, weights), abs=1e-12)
    assert out["gauc"] == pytest.approx(sum(a * w for a, w in used) / sum(w for _, w in used), abs=1e-12)
    assert out["gauc_mean"] == pytest.approx(np.mean([a for a, _ in used]), abs=1e-12)
    assert (out["num_groups_used"], out["num_groups"]) == (len(used), sum(w > 0 for _, w in each.values()))
    assert 0 < len(used) < len(each)


def test_group_auc_skips_one_class_groups_and_keeps_a_score_of_exactly_zero() -> None:
    out = _metrics([0.0, 1.0, 0.3, 0.9, 0.1, 0.1], [0, 1, 1, 1, 1, 0], groups=[7, 7, 8, 8, 9, 9])
    assert (out["gauc"], out["gauc_mean"], out["num_groups"], out["num_groups_used"]) == (0.75, 0.75, 3, 2)
    assert _metrics([0.0, 1.0, 0.2, 0.2, 0.1], [0, 1, 1, 1, 0], groups=[7, 7, 9, 9, 9])["gauc"] == 1.0


def test_group_auc_is_weighted_by_samples_beside_the_plain_mean() -> None:
    out = _metrics([0.1, 0.9, 0.9, 0.1, 0.2, 0.3], [0, 1, 0, 1, 1, 1], groups=[1, 1, 2, 2, 2, 2])
    assert (out["gauc"], out["gauc_mean"]) == ((1.0 * 2 + 0.0 * 4) / 6, 0.5)


def test_a_weight_of_two_is_the_sample_twice() -> None:
    twice = _metrics([0.2, 0.7, 0.7, 0.6], [0, 1, 1, 0], groups=[0] * 4)
    weighed = _metrics([0.2, 0.7, 0.6], [0, 1, 0], [1, 2, 1], groups=[0] * 3)
    different = {"count"}
    assert {k: v for k, v in twice.items() if k not in different} == pytest.approx({k: v for k, v in weighed.items() if k not in different})


def test_log_loss_ne_and_calibration_of_known_numbers() -> None:
    out = _metrics([0.8, 0.4, 0.4, 0.4], [1, 0, 0, 0])
    loss = -(math.log(0.8) + 3 * math.log(0.6)) / 4
    assert out["log_loss"] == pytest.approx(loss, abs=1e-15)
    assert out["ne"] == pytest.approx(loss / -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), abs=1e-15)
    assert out["calibration"] == pytest.approx(2.0, abs=1e-15)


def test_logits_and_probabilities_agree_and_large_logits_stay_exact() -> None:
    logits = np.array([-3.0, 0.5, 2.0, -0.1])
    ones, labels = np.ones(4), np.array([0.0, 1.0, 1.0, 0.0])
    a, b = binary_metrics(logits, labels, ones), binary_metrics(1 / (1 + np.exp(-logits)), labels, ones, logits=False)
    assert a == pytest.approx(b, abs=1e-12)
    far = _metrics([200.0, -300.0, 90.0, 89.0], [0, 1, 1, 0], logits=True)
    assert far["log_loss"] == (200 + 300 + 89) / 4
    assert far["auc"] == 0.25


@pytest.mark.parametrize("labels", [[0, 0], [1, 1], []])
def test_one_class_leaves_auc_and_ne_undefined_and_is_json(labels: list[float]) -> None:
    out = _metrics([0.25, 0.5][: len(labels)], labels)
    assert (out["auc"], out["ne"], out["gauc"], out["gauc_mean"]) == (None,) * 4
    assert json.loads(json.dumps(out, allow_nan=False)) == out


def test_weights_that_sum_to_zero_give_zero_means_and_no_warning() -> None:
    out = _metrics([0.2, 0.9], [0, 1], [0.0, 0.0])
    assert (out["count"], out["mean_score"], out["positive_rate"], out["log_loss"], out["auc"]) == (2, 0.0, 0.0, 0.0, None)


def test_a_nan_score_is_counted_and_spoils_nothing() -> None:
    out = _metrics([math.nan, 0.2, 0.7], [1, 0, 1])
    assert (out["count"], out["num_nan"], out["auc"], out["positive_rate"]) == (3, 1, 1.0, 0.5)


def test_a_certain_and_wrong_score_has_no_finite_log_loss() -> None:
    out = _metrics([1.0, 0.0], [0, 1])
    assert (out["log_loss"], out["ne"], out["auc"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("scores", "labels", "weights", "text"),
    [([0.5], [0.5], [1.0], "label is not binary"), ([0.5], [1.0], [-1.0], "weight is no weight"), ([1.5], [1.0], [1.0], "no probability")],
)
def test_what_is_no_label_weight_or_probability_is_named(scores: list[float], labels: list[float], weights: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _metrics(scores, labels, weights)


def test_labels_of_any_type_and_scores_of_two_dimensions_are_taken() -> None:
    for dtype in (torch.int64, torch.bool, torch.float64, torch.uint8):
        evaluator = BinaryEvaluator(ALONE)
        evaluator.add(torch.arange(2), torch.zeros(2, 1), torch.tensor([0, 1]).to(dtype), torch.ones(2))
        assert evaluator.result()["log_loss"] == pytest.approx(math.log(2), abs=1e-15)
