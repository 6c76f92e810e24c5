"""RaggedBatch: moves as one, and refuses what breaks an invariant, naming field, sample and value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from distrag.batch import RaggedBatch


def build(**changes: object) -> RaggedBatch:
    ids = KeyedJaggedTensor(
        keys=["item", "age"], values=torch.tensor([3, 1, 2, 7, 8, 0]), lengths=torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int64)
    )
    batch = RaggedBatch(
        ids=ids,
        offsets=torch.tensor([0, 2, 2, 3]),
        numbers=torch.tensor([[0.5], [1.0], [2.0]]),
        context=torch.zeros(3, 0),
        labels=torch.tensor([1.0, 0.0, 1.0]),
        weights=torch.ones(3),
        samples=torch.tensor([10, 11, 12]),
    )
    return replace(batch, **changes)  # type: ignore[arg-type]


def test_a_right_batch_passes_and_tells_its_sizes() -> None:
    batch = build()
    batch.check({"item": 4, "age": 9})
    assert (batch.num_samples, batch.num_tokens, batch.lengths.tolist()) == (3, 3, [2, 0, 1])


def test_moving_keeps_every_field_and_every_number() -> None:
    batch = build(step=4, epoch=2, global_count=5.0)
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert (moved.step, moved.epoch, moved.global_count) == (4, 2, 5.0)
    assert torch.equal(moved.ids.values(), batch.ids.values())
    assert moved.ids.keys() == ["item", "age"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.ones(2)}, r"(?s)wrong size.*labels"),
        ({"offsets": torch.tensor([0, 2, 2, 4])}, r"(?s)Offsets do not describe.*last 4"),
        ({"offsets": torch.tensor([0, 2, 1, 3])}, r"(?s)Offsets do not describe.*shortest length -1"),
        ({"numbers": torch.tensor([[0.5], [float("nan")], [2.0]])}, r"(?s)not finite.*nan.*sample 10"),
        ({"numbers": torch.tensor([[0.5], [1.0], [float("inf")]])}, r"(?s)not finite.*inf.*sample 12"),
        ({"weights": torch.tensor([1.0, float("nan"), 1.0])}, r"(?s)not finite.*sample 11"),
        ({"samples": torch.tensor([10, -1, 12])}, r"(?s)dummy sample carries weight"),
    ],
)
def test_what_breaks_an_invariant_is_named(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes).check()


def test_ids_outside_their_table_are_named_with_sample_and_position() -> None:
    with pytest.raises(ValueError, match=r"(?s)Ids outside.*\[3\].*0 \.\. 2.*key 'item', sample 10, positions \[0\]"):
        build().check({"item": 3})


def test_lengths_that_lie_about_a_key_are_refused() -> None:
    ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor([3, 1, 2]), lengths=torch.tensor([2, -1, 2], dtype=torch.int64))
    with pytest.raises(ValueError, match="Lengths of a key"):
        build(ids=ids).check()
