"""Ragged operations: right on every shape, empty sequences included, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag import ragged

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = [[3, 0, 1], [0, 0], [], [5], [0, 2, 0, 0, 7, 1, 0]]


def make(lengths: list[int], dim: int = 3, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = ragged.lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(int(offsets[-1]), dim, dtype=dtype, generator=generator), offsets


def rows(values: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(offsets.diff().tolist()))


def test_offsets_of_int32_lengths_do_not_wrap() -> None:
    offsets = ragged.lengths_to_offsets(torch.tensor([2147483647, 2], dtype=torch.int32))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 2147483647, 2147483649]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_offsets_are_int64_for_every_integer(dtype: torch.dtype) -> None:
    offsets = ragged.lengths_to_offsets(torch.tensor([200, 0, 100], dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 200, 200, 300]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 4])
def test_unpad_undoes_pad(lengths: list[int], side: ragged.Side, extra: int) -> None:
    values, offsets = make(lengths)
    padded = ragged.pad(values, offsets, max(lengths, default=0) + extra, side)
    assert torch.equal(ragged.unpad(padded, offsets, side), values)
    for b, row in enumerate(rows(values, offsets)):
        filled = padded[b, len(padded[b]) - len(row) :] if side == "left" else padded[b, : len(row)]
        assert torch.equal(filled, row)
        assert int((padded[b] != 0).sum()) == row.numel()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_to_less_keeps_the_newest(side: ragged.Side) -> None:
    offsets = torch.tensor([0, 6, 8])
    items = ragged.pad(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), offsets, 3, side)
    assert items.tolist() == [[4, 5, 6], [0, 7, 8] if side == "left" else [7, 8, 0]]


def test_pad_and_unpad_pass_gradients() -> None:
    values, offsets = make([3, 0, 2])
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ragged.pad(v, offsets, 2, "left"), (values,))
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: ragged.unpad(v, offsets), (padded,))


def test_shift_next_gives_the_following_item_of_the_same_sequence() -> None:
    offsets = torch.tensor([0, 3, 3, 4, 6])
    shifted = ragged.shift_next(torch.tensor([1, 2, 3, 4, 5, 6]), offsets, torch.tensor([10, 11, 12, 13]))
    assert shifted.tolist() == [2, 3, 10, 12, 6, 13]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_shift_next_passes_gradients_to_both(lengths: list[int]) -> None:
    values, offsets = make(lengths)
    last = torch.randn(len(lengths), 3, dtype=torch.float64, requires_grad=True)
    values.requires_grad_()
    shifted = ragged.shift_next(values, offsets, last)
    wanted = [torch.cat([row[1:], last[b : b + 1]]) for b, row in enumerate(rows(values, offsets)) if len(row)]
    assert torch.equal(shifted, torch.cat(wanted) if wanted else shifted[:0])
    if len(shifted):
        assert torch.autograd.gradcheck(lambda v, w: ragged.shift_next(v, offsets, w), (values, last))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_last_is_the_newest_row_or_zeros(lengths: list[int]) -> None:
    values, offsets = make(lengths)
    values.requires_grad_()
    got = ragged.last(values, offsets)
    wanted = [row[-1] if len(row) else torch.zeros(3, dtype=row.dtype) for row in rows(values, offsets)]
    assert torch.equal(got, torch.stack(wanted) if wanted else got[:0])
    got.sum().backward()
    assert values.grad is not None
    assert values.grad.sum() == 3 * sum(n > 0 for n in lengths)


def test_a_nan_does_not_leak_into_an_empty_neighbour() -> None:
    values = torch.tensor([[float("nan")], [1.0]])
    offsets = torch.tensor([0, 1, 1, 2, 2])
    for operation in (ragged.last, ragged.segment_sum, ragged.segment_mean, ragged.segment_max):
        out = operation(values, offsets)
        assert out[0].isnan().all()
        assert out[1:].flatten().tolist() == [0.0, 1.0, 0.0]


def plain_sum(row: torch.Tensor) -> torch.Tensor:
    return row.sum(0)


def plain_mean(row: torch.Tensor) -> torch.Tensor:
    return row.mean(0) if len(row) else row.sum(0)


def plain_max(row: torch.Tensor) -> torch.Tensor:
    return row.amax(0) if len(row) else row.sum(0)


SEGMENTS = [(ragged.segment_sum, plain_sum), (ragged.segment_mean, plain_mean), (ragged.segment_max, plain_max)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("operation", "plain"), SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_segment_operations_equal_plain_ones(
    lengths: list[int],
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    plain: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> None:
    values, offsets = make(lengths, dtype=dtype)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    got = operation(ours, offsets)
    parts = [plain(row) for row in rows(theirs, offsets)]
    wanted = torch.stack(parts) if parts else theirs[:0]
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted)
    weight = torch.arange(got.numel(), dtype=dtype).view_as(got)
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@given(st.lists(st.integers(0, 300), max_size=80))
@settings(max_examples=50, deadline=None)
def test_length_groups_hold_every_sequence_once_with_little_padding(lengths: list[int]) -> None:
    groups = ragged.length_groups(torch.tensor(lengths, dtype=torch.int64))
    held = sorted(i for group in groups for i in group.tolist())
    assert held == [i for i, length in enumerate(lengths) if length]
    for group in groups:
        sizes = [lengths[i] for i in group.tolist()]
        assert max(sizes) <= 1.3 * min(sizes) + 4
    assert len(groups) <= 14


# ---- dropout by keys


def keys_of(samples: list[int], lengths: list[int], step: int = 0, seed: int = 1) -> torch.Tensor:
    offsets = ragged.lengths_to_offsets(torch.tensor(lengths))
    return ragged.position_keys(torch.tensor(samples), offsets, seed=seed, epoch=0, step=step)


def test_keys_of_a_sample_do_not_depend_on_its_neighbours() -> None:
    both, alone = keys_of([7, 9], [3, 4]), keys_of([9], [4])
    assert torch.equal(both[3:], alone)
    assert len(set(both.tolist())) == 7
    assert set(both.tolist()).isdisjoint(keys_of([7, 9], [3, 4], step=1).tolist())
    assert set(both.tolist()).isdisjoint(keys_of([7, 9], [3, 4], seed=2).tolist())


def test_the_kernel_and_the_torch_twin_spread_the_same_keys() -> None:
    starts, offsets = torch.tensor([3, -1, 2**62, -(2**63)]), torch.tensor([0, 4, 4, 9, 10])
    keys = torch.empty(10, dtype=torch.int64)
    ragged._spread(starts.numpy(), offsets.numpy(), keys.numpy())
    assert torch.equal(ragged.spread_keys(starts, offsets), keys)


@pytest.mark.parametrize("site", [0, 1, 255])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_the_kernel_and_the_torch_twin_draw_the_same_mask(site: int, p: float) -> None:
    keys = keys_of([3, -1, 2**40], [50, 1, 20])
    x = torch.ones(71, 37)
    mask = ragged.keep_mask(keys, 37, p, site)
    assert torch.equal(ragged.dropout(x, p, keys, site), torch.where(mask, 1.0 / (1.0 - p), 0.0))
    half = ragged.dropout(x.bfloat16(), p, keys, site)
    assert torch.equal(half != 0, mask)


def test_dropout_drops_the_asked_share_and_no_row_column_or_site_repeats() -> None:
    keys = keys_of(list(range(100)), [20] * 100)
    mask = ragged.keep_mask(keys, 64, 0.3, 1).float()
    assert abs(mask.mean().item() - 0.7) < 0.005
    assert (mask.mean(0) - 0.7).abs().max() < 0.06
    assert (mask.mean(1) - 0.7).abs().max() < 0.35
    assert len(torch.unique(mask, dim=0)) == 2000
    other = ragged.keep_mask(keys, 64, 0.3, 2).float()
    assert abs((mask * other).mean().item() - 0.49) < 0.01
    assert abs((mask[1:] * mask[:-1]).mean().item() - 0.49) < 0.01


def test_backward_of_dropout_uses_the_forward_mask() -> None:
    keys = keys_of([1, 2], [3, 2])
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: ragged.dropout(v, 0.4, keys, 3), (x,))


def test_dropout_of_nothing_and_without_keys() -> None:
    x = torch.ones(4, 5)
    assert ragged.dropout(x, 0.0, None, 0) is x
    torch.manual_seed(0)
    assert (ragged.dropout(x, 0.5, None, 0) == 0).any()
    assert ragged.dropout(x[:0], 0.5, keys_of([1], [0]), 0).shape == (0, 5)
