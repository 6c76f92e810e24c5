"""Proof, before the clock runs, that both sides do the same work: same histories, same number of weights, same logits."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from distrag.batching.loader import Loader
    from distrag.bench.padded import Batch, PaddedModel
    from distrag.bench.ragged import RaggedSide


def check_histories(ragged: Loader, padded: DataLoader[Batch], num_steps: int = 3) -> None:
    """Raises when the first steps of both loaders hold other histories or labels."""
    for ours, theirs in zip(islice(iter(ragged), num_steps), islice(iter(padded), num_steps), strict=True):
        items = ours.ids["item"].values()
        columns = torch.arange(theirs["items"].shape[1])
        real = columns < theirs["lengths"][:, None]
        real = real.flip(1) if padded.collate_fn.__name__ == "collate_left" else real
        fields = ((theirs["items"][real], items), (theirs["lengths"], ours.lengths), (theirs["labels"], ours.labels))
        assert all(torch.equal(a, b) for a, b in fields), f"the sides see other histories in step {ours.step}"


def check_model(ragged: RaggedSide, padded: PaddedModel, loader: DataLoader[Batch], tolerance: float = 1e-4) -> float:
    """Returns the largest difference between the logits of both sides, with the same weights: those of the ragged side are copied.

    Raises:
        AssertionError: another number of weights, or logits further apart than `tolerance`.
    """
    count = sum(p.numel() for p in padded.parameters())
    assert ragged.count_parameters() == count, f"{ragged.count_parameters()} weights against {count}"
    copy_weights(ragged, padded)
    difference = logit_difference(ragged, padded, loader)
    assert difference <= tolerance, f"the logits differ by {difference}"
    return difference


def logit_difference(ragged: RaggedSide, padded: PaddedModel, loader: DataLoader[Batch]) -> float:
    """Returns the largest difference between the logits of both sides on the loaders' first batch, without dropout."""
    model = ragged.job.parallel.plain
    model.eval()
    padded.eval()
    ours, theirs = next(iter(ragged.loader)), next(iter(loader))
    # With gradients on: without them torch takes another path through its transformer layers.
    difference = (model.predict(ours) - padded(theirs["items"], theirs["lengths"])).detach().abs().max()
    ragged.job.parallel.model.train()
    padded.train()
    return float(difference)


@torch.no_grad()
def copy_weights(ragged: RaggedSide, padded: PaddedModel) -> None:
    """Copies every weight of the ragged side to where the padded side has it."""
    plain = ragged.job.parallel.plain
    (_, _, table), *_ = ragged.job.parallel.item_shards("item")
    padded.items.weight.copy_(table)
    assert plain.head is not None
    padded.head.load_state_dict(plain.head.state_dict())
    encoder = cast("nn.Module", plain.encoder)
    made = {_padded_name(name): value for name, value in encoder.state_dict().items()}
    padded.encoder.load_state_dict(made)


_NAMES = {
    "transformer.positions": "positions",
    "transformer.blocks": "layers.layers",
    "transformer.norm": "layers.norm",
    "norm_attention": "norm1",
    "norm_ffn": "norm2",
    "qkv.": "self_attn.in_proj_",
    ".out.": ".self_attn.out_proj.",
    "up.": "linear1.",
    "down.": "linear2.",
}


def _padded_name(name: str) -> str:
    if name.startswith("layers."):  # distrag's GRU has one module a layer, torch's one for all
        _, layer, weight = name.split(".")
        return f"gru.{weight.removesuffix('0')}{layer}"
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name
