"""What every loss promises, run over all of LOSSES."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distrag.loss import LOSSES, ConversionTargets, NextItemTargets

P, D, V, N = 12, 6, 20, 8
each = pytest.mark.parametrize("name", LOSSES)


def build(name: str) -> Any:
    kind: Any = LOSSES[name]
    return kind(kind.Config())


def make(name: str, seed: int = 0) -> tuple[Any, list[Tensor]]:
    """Targets of the kind the loss wants, and the tensors that take a gradient."""
    g = torch.Generator().manual_seed(seed)
    kind = LOSSES[name]
    weights = torch.rand(P, generator=g)
    if kind.task == "conversion":
        logits = torch.randn(P, generator=g).requires_grad_()
        return ConversionTargets(logits, torch.randint(0, 2, (P,), generator=g), weights), [logits]
    states, items = torch.randn(P, D, generator=g).requires_grad_(), torch.randn(V, D, generator=g).requires_grad_()
    ids = torch.randint(1, V, (P,), generator=g)
    drawn = torch.randint(1, V, (N,) if kind.negatives == "shared" else (P, 1), generator=g)
    no_draws = kind.negatives == "none"
    targets = NextItemTargets(
        states=states,
        target_ids=ids,
        weights=weights,
        target_vectors=None if kind.needs_table else items[ids],
        negative_ids=None if no_draws else drawn,
        negative_vectors=None if no_draws else items[drawn],
        item_vectors=items if kind.needs_table else None,
    )
    return targets, [states, items]


def take(targets: Any, rows: Tensor) -> Any:
    """The targets at these positions alone; shared negatives stay."""

    def pick(name: str, value: Any) -> Any:
        if value is None or name == "item_vectors" or (name.startswith("negative") and targets.negative_ids.dim() == 1):
            return value
        return value[rows]

    return type(targets)(**{name: pick(name, value) for name, value in vars(targets).items()})


@each
def test_the_sum_and_the_count_are_float32_scalars_with_gradients(name: str) -> None:
    targets, leaves = make(name)
    total, count = build(name)(targets)
    assert total.shape == count.shape == ()
    assert total.dtype == count.dtype == torch.float32
    torch.testing.assert_close(count, targets.weights.sum())
    assert not count.requires_grad
    for grad in torch.autograd.grad(total, leaves):
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


@each
def test_splitting_a_batch_gives_the_same_totals_and_gradients(name: str) -> None:
    loss, (targets, leaves) = build(name), make(name)
    total, count = loss(targets)
    rows = torch.arange(P)
    parts = [loss(take(targets, part)) for part in (rows[:1], rows[1:1], rows[1:9], rows[9:])]
    torch.testing.assert_close(sum(part[0] for part in parts), total)
    torch.testing.assert_close(sum(part[1] for part in parts), count)
    whole = torch.autograd.grad(total, leaves, retain_graph=True)
    split = torch.autograd.grad(sum(part[0] for part in parts), leaves)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each
def test_the_order_does_not_matter(name: str) -> None:
    loss, (targets, _) = build(name), make(name)
    order = torch.randperm(P, generator=torch.Generator().manual_seed(1))
    for a, b in zip(loss(targets), loss(take(targets, order)), strict=True):
        torch.testing.assert_close(a, b)


@each
def test_masked_targets_weigh_nothing(name: str) -> None:
    loss, (targets, _) = build(name), make(name)
    rows = torch.arange(P)
    without = loss(take(targets, rows[:7]))
    fields = {**vars(targets), "weights": targets.weights * (rows < 7)}
    for a, b in zip(loss(type(targets)(**fields)), without, strict=True):
        torch.testing.assert_close(a, b)
    if LOSSES[name].task == "next_item":
        fields = {**vars(targets), "target_ids": targets.target_ids * (rows < 7)}
        for a, b in zip(loss(type(targets)(**fields)), without, strict=True):
            torch.testing.assert_close(a, b)


@each
@pytest.mark.parametrize("left", [3, 0])
def test_no_target_at_all_gives_zero_and_finite_gradients(name: str, left: int) -> None:
    loss, (targets, leaves) = build(name), make(name)
    targets = take(targets, torch.arange(left))
    fields = {**vars(targets), "weights": torch.zeros(left)}
    if LOSSES[name].task == "next_item":
        fields = {**vars(targets), "target_ids": torch.zeros(left, dtype=torch.int64)}
    total, count = loss(type(targets)(**fields))
    assert (total.item(), count.item()) == (0.0, 0.0)
    for grad in torch.autograd.grad(total, leaves, allow_unused=True):
        assert grad is not None
        assert (grad == 0).all()


@each
def test_two_uneven_ranks_report_and_learn_the_mean_over_all_tokens(name: str) -> None:
    """Three targets on one rank and one on the other: (sum, count) added up, divided once."""
    loss, (targets, leaves) = build(name), make(name)
    four = take(targets, torch.arange(4))
    total, count = loss(four)
    ranks = [loss(take(targets, torch.arange(3))), loss(take(targets, torch.arange(3, 4)))]
    torch.testing.assert_close((ranks[0][0] + ranks[1][0]) / (ranks[0][1] + ranks[1][1]), total / count)
    global_count = (ranks[0][1] + ranks[1][1]).item()
    # what DDP does: every rank scales by W / global count, the gradients are averaged over W
    averaged = torch.autograd.grad(sum(part * 2 / global_count for part, _ in ranks) / 2, leaves, retain_graph=True)
    for a, b in zip(averaged, torch.autograd.grad(total / count, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each
def test_autocast_and_half_precision_inputs_give_a_float32_loss(name: str) -> None:
    loss, (targets, _) = build(name), make(name)
    halves = {k: v.bfloat16() if v is not None and v.is_floating_point() and k != "weights" else v for k, v in vars(targets).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, count = loss(targets)
        rough, _ = loss(type(targets)(**halves))
    plain, _ = loss(targets)
    assert total.dtype == count.dtype == rough.dtype == torch.float32
    assert total == plain
    torch.testing.assert_close(rough, plain, rtol=0.05, atol=0.05)


@each
def test_without_gradients_the_numbers_are_the_same(name: str) -> None:
    loss, (targets, _) = build(name), make(name)
    with torch.no_grad():
        assert torch.equal(loss(targets)[0], loss(targets)[0])
    with torch.no_grad():
        quiet = loss(targets)[0]
    torch.testing.assert_close(quiet, loss(targets)[0].detach())


def test_every_loss_has_a_documented_config() -> None:
    for name, kind in LOSSES.items():
        assert kind.Config.__doc__, name
        for field in kind.Config.__dataclass_fields__:
            assert f"{field}:" in kind.Config.__doc__, (name, field)
