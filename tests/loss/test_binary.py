"""The label's dtype and shape never change the loss."""

from __future__ import annotations

import math

import pytest
import torch

from distrag.loss import Binary, BinaryConfig, ConversionTargets


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize("logits_shape", [(2,), (2, 1)])
@pytest.mark.parametrize("labels_shape", [(2,), (2, 1)])
def test_any_label_dtype_and_shape_gives_the_same_float32_loss(
    dtype: torch.dtype, logits_shape: tuple[int, ...], labels_shape: tuple[int, ...]
) -> None:
    labels = torch.tensor([0, 1], dtype=dtype).view(labels_shape)
    total, count = Binary(BinaryConfig())(ConversionTargets(torch.zeros(logits_shape), labels, torch.ones(2, dtype=torch.float64)))
    assert total.dtype == count.dtype == torch.float32
    assert (total / count).item() == pytest.approx(math.log(2), abs=1e-7)


def test_a_sample_of_weight_two_counts_twice() -> None:
    logits, labels = torch.tensor([0.3, -1.0]), torch.tensor([1, 0])
    weighted = Binary(BinaryConfig())(ConversionTargets(logits, labels, torch.tensor([2.0, 1.0])))
    repeated = Binary(BinaryConfig())(ConversionTargets(logits[[0, 0, 1]], labels[[0, 0, 1]], torch.ones(3)))
    for a, b in zip(weighted, repeated, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("logits", "labels", "part"),
    [
        (torch.zeros(4), torch.zeros(3), "4, 3, 4"),
        (torch.zeros(4, 2), torch.zeros(4), r"logits"),
        (torch.zeros(4), torch.zeros(4, 1, 1), r"labels"),
    ],
)
def test_a_shape_mismatch_is_named(logits: torch.Tensor, labels: torch.Tensor, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Binary(BinaryConfig())(ConversionTargets(logits, labels, torch.ones(4)))
