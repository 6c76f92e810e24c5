"""The recurrent encoder: torch's own numbers, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distrag import ragged
from distrag.encoder import GRU, GRUConfig
from distrag.encoder.gru import _time_major, packed_gru
from tests.encoder.sequences import inputs


def pair(dim: int, dtype: torch.dtype = torch.float32) -> tuple[GRU, nn.GRU]:
    torch.manual_seed(3)
    ours, theirs = GRU(GRUConfig(), dim, 50).to(dtype), nn.GRU(dim, dim, batch_first=True).to(dtype)
    ours.layers[0].load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_the_last_state_is_not_read_at_the_padded_end(length: int) -> None:
    ours, theirs = pair(4)
    x, offsets = inputs([length], dim=4)
    true = theirs(x[None])[1][0]
    for side in ("left", "right"):
        through = ragged.unpad(ragged.pad(x, offsets, 5, side), offsets, side)
        torch.testing.assert_close(ours.pool(through, offsets), true, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [2, 5, 16, 50, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_and_gradients_equal_packed_sequences(dim: int, dtype: torch.dtype) -> None:
    ours, theirs = pair(dim, dtype)
    x, offsets = inputs([3, 0, 1, 12, 7, 7, 0, 30], dim=dim, dtype=dtype)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(len(x), dim, dtype=dtype)
    got, wanted = ours(x, offsets), packed_gru(theirs, y, *_time_major(offsets))
    close = {"rtol": 0.0, "atol": 2e-6 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(got, wanted, **close)
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=5e-5)


def test_the_packed_twin_equals_one_sequence_at_a_time() -> None:
    _, theirs = pair(6)
    x, offsets = inputs([3, 0, 5, 1], dim=6)
    states = packed_gru(theirs, x, *_time_major(offsets))
    for b in range(4):
        part = x[offsets[b] : offsets[b + 1]]
        if len(part):
            torch.testing.assert_close(states[offsets[b] : offsets[b + 1]], theirs(part[None])[0][0], rtol=0, atol=1e-6)


def test_an_empty_history_beside_others_changes_nothing() -> None:
    ours, _ = pair(2)
    x, offsets = inputs([3, 0, 1], dim=2)
    pooled = ours.pool(x, offsets)
    assert (pooled[1] == 0).all()
    torch.testing.assert_close(pooled[0], ours.pool(x[:3], torch.tensor([0, 3]))[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(pooled[2], ours.pool(x[3:], torch.tensor([0, 1]))[0], rtol=0, atol=1e-6)


def test_large_gates_saturate_without_overflow() -> None:
    ours, _ = pair(4)
    x, offsets = inputs([5], dim=4)
    states = ours(x * 1e4, offsets)
    states.sum().backward()
    assert states.isfinite().all()
    assert states.abs().max() <= 1.0
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder\.num_layers"):
        GRU(GRUConfig(num_layers=0), 8, 10)
    with pytest.raises(ValueError, match=r"encoder\.dropout"):
        GRU(GRUConfig(dropout=1.0), 8, 10)


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    ours, _ = pair(64)
    x, offsets = inputs([3, 0, 1, 12, 40], dim=64)
    on_cpu = ours(x, offsets)
    on_cuda = ours.cuda()(x.detach().cuda(), offsets.cuda())
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=1e-3, atol=1e-3)
