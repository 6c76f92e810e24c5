"""Attention inside ragged sequences: torch's own numbers, in every dtype, without masks that overflow."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distrag import ragged
from distrag.encoder import SASRec, SASRecConfig, SelfAttention, SelfAttentionConfig
from distrag.encoder.attention import Block, attend, grouped_attention
from tests.encoder.sequences import MAX_LEN, inputs

LENGTHS = [3, 0, 1, 17, 40, 16, 0, 5]
paths = pytest.mark.parametrize("path", [attend, grouped_attention])


def run(path: object, qkv: Tensor, offsets: Tensor, num_heads: int, causal: bool) -> Tensor:
    if path is attend:
        return attend(qkv, offsets, num_heads, causal=causal, max_len=MAX_LEN)
    return grouped_attention(qkv, offsets, num_heads, causal=causal)


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_single_key_takes_all_the_weight(path: object, dtype: torch.dtype) -> None:
    """One query, keys equal, the second event of a rectangle cut off: the mask's polarity shows at once."""
    qkv = torch.tensor([[1.0, 1.0, 2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0, 9.0, 9.0], [1.0, 1.0, 2.0, 2.0, 1e4, 1e4]], dtype=dtype)
    offsets = torch.tensor([0, 1, 3])  # the second sequence stands where padding would
    for causal in (False, True):
        out = run(path, qkv, offsets, 1, causal)
        assert out[0].tolist() == [1.0, 1.0]
        assert out.isfinite().all()


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal_and_padding_masks_meet_without_overflow(path: object, dtype: torch.dtype) -> None:
    qkv = torch.zeros(4, 6, dtype=dtype, requires_grad=True)
    values = torch.tensor([[1.0], [9.0], [1.0], [9.0]], dtype=dtype)
    given = torch.cat([qkv[:, :4], qkv[:, 4:] + values], 1)
    out = run(path, given, torch.tensor([0, 2, 3, 4]), 1, True)
    assert out[:, 0].tolist() == [1.0, 5.0, 1.0, 9.0]
    out.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "num_heads"), [(2, 1), (12, 3), (64, 1), (64, 2), (50, 1), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_equals_grouped_rectangles(causal: bool, dim: int, num_heads: int, dtype: torch.dtype) -> None:
    qkv, offsets = inputs(LENGTHS, dim=3 * dim, dtype=dtype)
    twin = qkv.detach().clone().requires_grad_()
    got, wanted = run(attend, qkv, offsets, num_heads, causal), run(grouped_attention, twin, offsets, num_heads, causal)
    exact = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(got, wanted, **exact)
    weight = torch.randn(got.shape, dtype=dtype)
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(qkv.grad, twin.grad, rtol=0, atol=exact["atol"] * 10)


@paths
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_do_not_overflow(path: object, causal: bool) -> None:
    qkv, offsets = inputs([20, 3], dim=24)
    out = run(path, qkv * 100, offsets, 2, causal)
    out.sum().backward()
    assert out.isfinite().all()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


def test_an_empty_sequence_leaves_every_gradient_as_without_it() -> None:
    """In a padded batch its row would be fully masked, and its NaN would reach the shared projections."""
    torch.manual_seed(0)
    alone = SelfAttention(SelfAttentionConfig(dropout=0.0), 8, MAX_LEN)
    beside = copy.deepcopy(alone)
    x, offsets = inputs([2, 0])
    pooled = beside.pool(x, offsets)
    assert (pooled[1] == 0).all()
    pooled[0].sum().backward()
    alone.pool(x.detach(), torch.tensor([0, 2])).sum().backward()
    for a, b in zip(alone.parameters(), beside.parameters(), strict=True):
        assert b.grad is not None
        assert b.grad.isfinite().all()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_equals_one_made_of_torch_modules(causal: bool) -> None:
    torch.manual_seed(0)
    block = Block(SASRecConfig(num_heads=2, activation="relu"), 16, MAX_LEN, causal=causal, site=0).eval()
    for norm in (block.norm_attention, block.norm_ffn):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    mha = nn.MultiheadAttention(16, 2, batch_first=True)
    mha.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight,
            "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.out.weight,
            "out_proj.bias": block.out.bias,
        }
    )
    x, offsets = inputs([5, 2, 9], dim=16)
    T = 9
    padded = ragged.pad(x, offsets)
    h = block.norm_attention(padded)
    empty = torch.arange(T) >= offsets.diff()[:, None]
    later = torch.triu(torch.ones(T, T, dtype=torch.bool), 1) if causal else None
    padded = padded + mha(h, h, h, key_padding_mask=empty, attn_mask=later, need_weights=False)[0]
    padded = padded + block.down(F.relu(block.up(block.norm_ffn(padded))))
    torch.testing.assert_close(block(x, offsets, None), ragged.unpad(padded, offsets), rtol=0, atol=1e-5)


def test_positions_are_counted_from_the_newest_event() -> None:
    """Cutting the oldest events leaves the position of the kept ones: the newest is number 0."""
    assert ragged.age(torch.tensor([0, 3, 3, 5]), 5).tolist() == [2, 1, 0, 1, 0]
    encoder = SASRec(SASRecConfig(num_layers=1), 8, 4).eval()
    x, offsets = inputs([3])
    before = encoder.pool(x, offsets)
    with torch.no_grad():
        encoder.transformer.positions[3] += 1.0  # nobody is that old
        assert torch.equal(encoder.pool(x, offsets), before)
        encoder.transformer.positions[0] += torch.randn(8)
        assert not torch.allclose(encoder.pool(x, offsets), before)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    encoder = SASRec(SASRecConfig(), 8, 4)
    x, offsets = inputs([2, 5])
    with pytest.raises(ValueError, match=r"length 5(.|\n)*sequence 1"):
        encoder(x, offsets)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SASRecConfig(num_heads=3), r"encoder\.num_heads"),
        (SASRecConfig(num_heads=0), r"encoder\.num_heads"),
        (SASRecConfig(num_layers=0), r"encoder\.num_layers"),
        (SASRecConfig(dropout=-0.1), r"encoder\.dropout"),
        (SASRecConfig(ffn_factor=0.0), r"encoder\.ffn_factor"),
        (SASRecConfig(activation="tanh"), r"encoder\.activation"),
    ],
)
def test_options_that_cannot_work_are_refused(config: SASRecConfig, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        SASRec(config, 8, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_variable_length_kernel_equals_grouped_rectangles(causal: bool) -> None:
    qkv, offsets = inputs(LENGTHS, dim=3 * 64)
    given = qkv.detach().cuda().bfloat16().requires_grad_()
    twin = given.detach().clone().requires_grad_()
    got = attend(given, offsets.cuda(), 2, causal=causal, max_len=MAX_LEN)
    wanted = grouped_attention(twin, offsets.cuda(), 2, causal=causal)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    got.float().square().sum().backward()
    wanted.float().square().sum().backward()
    torch.testing.assert_close(given.grad, twin.grad, rtol=0.05, atol=0.05)
