"""What every encoder promises, run over all of ENCODERS."""

from __future__ import annotations

import copy

import pytest
import torch

from distrag import ragged
from distrag.encoder import ENCODERS
from tests.encoder.sequences import DIM, VARIANTS, build, inputs

LENGTHS = [3, 0, 1, 20, 33, 7, 0]
each = pytest.mark.parametrize("variant", VARIANTS)


def check_gradients(encoder: torch.nn.Module, x: torch.Tensor) -> None:
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@each
def test_changing_one_sequence_changes_no_other(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs(LENGTHS)
    changed = x.detach().clone()
    changed[offsets[3] : offsets[4]] = float("nan")
    before, after = encoder(x, offsets), encoder(changed, offsets)
    others = torch.ones(len(x), dtype=torch.bool)
    others[offsets[3] : offsets[4]] = False
    assert torch.equal(before[others], after[others])
    pooled = torch.arange(len(LENGTHS)) != 3
    assert torch.equal(encoder.pool(x, offsets)[pooled], encoder.pool(changed, offsets)[pooled])
    assert encoder.pool(changed, offsets)[3].isnan().any()


@each
def test_a_causal_state_sees_no_later_event(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs([9, 4])
    changed = x.detach().clone()
    changed[6:9] += 1.0
    before, after = encoder(x, offsets), encoder(changed, offsets)
    same = torch.equal(before[:6], after[:6])
    assert same == encoder.causal
    assert not torch.equal(before[6:9], after[6:9])


@each
def test_a_batch_equals_one_sequence_at_a_time(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs(LENGTHS)
    states, pooled = encoder(x, offsets), encoder.pool(x, offsets)
    for b in range(len(LENGTHS)):
        part = x[offsets[b] : offsets[b + 1]]
        own = torch.tensor([0, len(part)])
        torch.testing.assert_close(states[offsets[b] : offsets[b + 1]], encoder(part, own), rtol=0, atol=1e-6)
        torch.testing.assert_close(pooled[b], encoder.pool(part, own)[0], rtol=0, atol=1e-6)


@each
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [3, 8, 50])
def test_positions_do_not_follow_the_padding(variant: str, side: ragged.Side, length: int) -> None:
    encoder, (x, offsets) = build(variant), inputs([3, 2, 0])
    through = ragged.unpad(ragged.pad(x, offsets, length, side), offsets, side)
    torch.testing.assert_close(encoder.pool(through, offsets), encoder.pool(x, offsets), rtol=0, atol=1e-6)


@each
def test_an_empty_history_gives_zeros_and_finite_gradients(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs([3, 0, 1])
    pooled = encoder.pool(x, offsets)
    assert (pooled[1] == 0).all()
    (pooled.square().sum() + encoder(x, offsets).square().sum()).backward()
    check_gradients(encoder, x)


@each
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_batch_of_nothing_works_and_keeps_the_graph(variant: str, lengths: list[int]) -> None:
    encoder, (x, offsets) = build(variant), inputs(lengths)
    encoder.train()
    keys = ragged.position_keys(torch.arange(len(lengths)), offsets, 0, 0, 0)
    pooled, states = encoder.pool(x, offsets, keys), encoder(x, offsets, keys)
    assert pooled.shape == (len(lengths), DIM)
    assert states.shape == (0, DIM)
    (pooled.sum() + states.sum()).backward()
    check_gradients(encoder, x)


@each
def test_the_pooled_vector_is_the_last_state_or_the_mean_of_states(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs(LENGTHS)
    reduce = ragged.last if encoder.causal else ragged.segment_mean
    torch.testing.assert_close(encoder.pool(x, offsets), reduce(encoder(x, offsets), offsets), rtol=1e-6, atol=1e-6)


@each
def test_double_precision_passes_gradcheck(variant: str) -> None:
    encoder, (x, offsets) = build(variant, dim=4).double(), inputs([3, 0, 1, 2], dim=4, dtype=torch.float64)
    parameters = tuple(encoder.parameters())

    def run(values: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return encoder(values, offsets), encoder.pool(values, offsets)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@each
def test_single_equals_double_precision(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs(LENGTHS)
    twin = copy.deepcopy(encoder).double()
    y = x.detach().double().requires_grad_()
    single, double = encoder.pool(x, offsets), twin.pool(y, offsets)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
    single.square().sum().backward()
    double.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)
    for a, b in zip(encoder.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4 * max(1.0, b.grad.abs().max().item()))


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_and_finite(variant: str, dtype: torch.dtype) -> None:
    encoder, (x, offsets) = build(variant), inputs([3, 0, 1, 20])
    full = encoder.pool(x, offsets)
    half = copy.deepcopy(encoder).to(dtype)
    y = x.detach().to(dtype).requires_grad_()
    pooled = half.pool(y, offsets)
    torch.testing.assert_close(pooled.float(), full, rtol=0.05, atol=0.1)
    (pooled.float().square().sum() + half(y, offsets).float().square().sum()).backward()
    check_gradients(half, y)


@each
def test_autocast_stays_close_and_finite(variant: str) -> None:
    encoder, (x, offsets) = build(variant), inputs(LENGTHS)
    full = encoder.pool(x, offsets)
    for given in (x, x.detach().bfloat16().requires_grad_()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pooled = encoder.pool(given, offsets)
            loss = pooled.float().square().sum() + encoder(given, offsets).float().square().sum()
        loss.backward()
        torch.testing.assert_close(pooled.float(), full, rtol=0.05, atol=0.1)
        check_gradients(encoder, given)


@each
def test_dropout_by_keys_does_not_depend_on_the_neighbours(variant: str) -> None:
    name = VARIANTS[variant][0]
    encoder = build(variant, dropout=0.5) if name in ("gru", "self_attention", "sasrec") else build(variant)
    encoder.train()
    x, offsets = inputs([4, 6])
    keys = ragged.position_keys(torch.tensor([11, 12]), offsets, 0, 0, 5)
    both = encoder(x, offsets, keys)
    alone = ragged.position_keys(torch.tensor([12]), torch.tensor([0, 6]), 0, 0, 5)
    torch.testing.assert_close(both[4:], encoder(x[4:], torch.tensor([0, 6]), alone), rtol=0, atol=1e-5)
    assert torch.equal(both, encoder(x, offsets, keys))
    if name in ("gru", "self_attention", "sasrec"):
        other = ragged.position_keys(torch.tensor([11, 12]), offsets, 0, 0, 6)
        assert not torch.equal(both, encoder(x, offsets, other))
        assert not torch.equal(encoder(x, offsets), encoder(x, offsets))  # without keys: torch's generator


@each
def test_the_cost_grows_with_the_length(variant: str) -> None:
    encoder = build(variant)
    a, b, c = encoder.cost(encoder.Config(), 64)
    assert a == 1.0
    assert (b > 0) == (VARIANTS[variant][0] in ("self_attention", "sasrec"))
    assert c >= 0


def test_every_encoder_has_a_documented_config() -> None:
    for name, kind in ENCODERS.items():
        assert kind.Config.__doc__, name
        for field in kind.Config.__dataclass_fields__:
            assert f"{field}:" in kind.Config.__doc__, (name, field)
