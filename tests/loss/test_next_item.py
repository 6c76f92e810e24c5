"""The next-item losses against plain formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distrag.loss import (
    BCE,
    BCEConfig,
    FullSoftmax,
    FullSoftmaxConfig,
    NextItemTargets,
    SampledSoftmax,
    SampledSoftmaxConfig,
)
from distrag.loss.full_softmax import full_softmax
from distrag.loss.sampled_softmax import sampled_softmax

P, D, V, N = 40, 6, 15, 9


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def same(loss: Tensor, plain: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bce_is_the_cross_entropy_of_one_positive_and_its_negatives() -> None:
    states, items, ids, drawn = random(P, D), random(V, D, seed=1), numbers(V, P), numbers(V, P, 3, seed=1)
    weights = torch.rand(P)
    total, _ = BCE(BCEConfig(3))(NextItemTargets(states, ids, weights, items[ids], drawn, items[drawn]))
    positive = torch.sigmoid((states * items[ids]).sum(1)).log()
    negative = (1 - torch.sigmoid((states[:, None] * items[drawn]).sum(2))).log()
    negative = torch.where(drawn == ids[:, None], 0.0, negative)
    same(total, -(weights * (positive + negative.sum(1))).sum(), [states, items])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("positions", [P, 3000])
def test_sampled_softmax_is_the_cross_entropy_over_positive_and_negatives(normalize: bool, temperature: float, positions: int) -> None:
    states, items, ids, drawn = (
        random(positions, D),
        random(V, D, seed=1),
        numbers(V, positions),
        numbers(V, 300 if positions > P else N, seed=1),
    )
    weights = torch.rand(positions)
    config = SampledSoftmaxConfig(temperature=temperature, normalize=normalize)
    total, _ = SampledSoftmax(config)(NextItemTargets(states, ids, weights, items[ids], drawn, items[drawn]))
    s, v = (F.normalize(states, dim=1), F.normalize(items, dim=1)) if normalize else (states, items)
    logits = (s @ v[drawn].t()).masked_fill(drawn == ids[:, None], float("-inf"))
    logits = torch.cat([(s * v[ids]).sum(1, keepdim=True), logits], 1) / temperature
    plain = (F.cross_entropy(logits, torch.zeros(positions, dtype=torch.int64), reduction="none") * weights).sum()
    same(total / positions, plain / positions, [states, items])


def test_a_negative_equal_to_the_target_is_no_candidate() -> None:
    states, vector = torch.ones(1, 2), torch.ones(1, 2)
    ids = torch.tensor([3])
    for loss in (SampledSoftmax(SampledSoftmaxConfig()), BCE(BCEConfig())):
        drawn = ids if isinstance(loss, SampledSoftmax) else ids[None]
        negative = vector if isinstance(loss, SampledSoftmax) else vector[None]
        total, _ = loss(NextItemTargets(states, ids, torch.ones(1), vector, drawn, negative))
        wanted = 0.0 if isinstance(loss, SampledSoftmax) else F.softplus(torch.tensor(-2.0)).item()
        assert total.item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("chunk_logits", [1, 64, 1 << 20])
def test_full_softmax_is_the_cross_entropy_over_all_items_but_the_unknown(chunk_logits: int) -> None:
    states, items, ids, weights = random(P, D), random(V, D, seed=1), numbers(V, P), torch.rand(P)
    config = FullSoftmaxConfig(temperature=0.5, chunk_logits=chunk_logits)
    total, _ = FullSoftmax(config)(NextItemTargets(states, ids, weights, item_vectors=items))
    plain = F.cross_entropy((states @ items[1:].t()) * 2, ids - 1, reduction="none")
    same(total, (plain * weights).sum(), [states, items])
    assert (torch.autograd.grad(FullSoftmax(config)(NextItemTargets(states, ids, weights, item_vectors=items))[0], items)[0][0] == 0).all()


def test_hand_written_gradients_pass_gradcheck() -> None:
    double = torch.float64
    states, items, drawn = random(5, 3, dtype=double), random(7, 3, dtype=double, seed=1), random(4, 3, dtype=double, seed=2)
    ids, weights = torch.tensor([1, 6, 0, 3, 3]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=double)
    assert torch.autograd.gradcheck(lambda s, v: full_softmax(s, v, ids, weights, 0.7, 10), (states, items))
    positives = random(5, 3, dtype=double, seed=3)
    numbers_drawn = torch.tensor([1, 3, 5, 2])
    assert torch.autograd.gradcheck(lambda s, y, n: sampled_softmax(s, y, n, ids, numbers_drawn, weights, 0.7), (states, positives, drawn))


def test_large_logits_do_not_overflow() -> None:
    states, items, ids, drawn = random(P, D), random(V, D, seed=1), numbers(V, P), numbers(V, N, seed=1)
    targets = NextItemTargets(states * 1e3, ids, torch.ones(P), items[ids], drawn, items[drawn], items)
    for loss in (SampledSoftmax(SampledSoftmaxConfig()), FullSoftmax(FullSoftmaxConfig())):
        total, _ = loss(targets)
        assert total.isfinite()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(total, [states, items], retain_graph=True))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: BCE(BCEConfig(num_negatives=0)), r"loss\.num_negatives"),
        (lambda: SampledSoftmax(SampledSoftmaxConfig(num_negatives=0)), r"loss\.num_negatives"),
        (lambda: SampledSoftmax(SampledSoftmaxConfig(temperature=0.0)), r"loss\.temperature"),
        (lambda: FullSoftmax(FullSoftmaxConfig(temperature=-1.0)), r"loss\.temperature"),
    ],
)
def test_options_that_cannot_work_are_refused(make: object, key: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=key):
        make()
