"""The padded way of working: what most sequence recommenders do, written as well as that way allows.

Samples are dicts of Python lists, a batch is a rectangle as wide as its longest history, lengths become masks, and the item table is
an `nn.Embedding`. The model is distrag's own, weight for weight; a test copies one into the other and compares logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrag.batching.plan import EpochPlan
    from distrag.bench.histories import BenchData
    from distrag.bench.shape import ModelShape

Sample = dict[str, Any]
Batch = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """One dict of plain Python values a sample, all in memory before the clock runs."""

    def __init__(self, data: BenchData) -> None:
        # One object a distinct item: a list for each of a million histories then fits in memory, and the cache.
        objects = np.arange(data.num_rows).astype(object)
        stops, labels = data.offsets.tolist(), data.labels.tolist()
        items = objects[data.items].tolist()
        self.rows = [{"items": items[stops[i] : stops[i + 1]], "label": labels[i]} for i in range(len(labels))]

    def __len__(self) -> int:
        """Samples."""
        return len(self.rows)

    def __getitem__(self, sample: int) -> Sample:
        """Returns `{"items": list, "label": float}`."""
        return self.rows[sample]


def collate(samples: list[Sample], left: bool = False) -> Batch:
    """Returns rectangles as wide as the longest history: items int64 `[B, T]` with 0 as padding, lengths int64 `[B]`, labels `[B]`.

    Args:
        samples: of `Samples`.
        left: padding goes before the history, so that the newest events stand in one column.
    """
    lengths = [len(sample["items"]) for sample in samples]
    width = max(1, *lengths)
    if left:
        rows = [[0] * (width - n) + sample["items"] for sample, n in zip(samples, lengths, strict=True)]
    else:
        rows = [sample["items"] + [0] * (width - n) for sample, n in zip(samples, lengths, strict=True)]
    labels = [sample["label"] for sample in samples]
    return {"items": torch.tensor(rows), "lengths": torch.tensor(lengths), "labels": torch.tensor(labels)}


def collate_left(samples: list[Sample]) -> Batch:
    """Returns `collate` with the padding before the history."""
    return collate(samples, left=True)


def build_loader(samples: Samples, plan: EpochPlan, *, left: bool = False) -> DataLoader[Batch]:
    """Returns a DataLoader in this process that visits the planned steps; the sample numbers cost it nothing."""
    steps = [plan.samples(step, 0).tolist() for step in range(plan.num_steps)]
    return DataLoader(samples, batch_sampler=steps, collate_fn=collate_left if left else collate)


class GRUEncoder(nn.Module):
    """The state after the newest event, by torch's packed sequences."""

    left = False

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gru = nn.GRU(shape.dim, shape.dim, shape.num_layers, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns `[B, D]` from `[B, T, D]`."""
        packed = pack_padded_sequence(x, lengths.clamp_min(1), batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return cast("Tensor", last[-1])


class AttentionEncoder(nn.Module):
    """The mean state of pre-norm transformer layers on `nn.MultiheadAttention`, positions counted from the newest event."""

    left = True

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        D, p = shape.dim, shape.dropout
        self.positions = nn.Parameter(torch.empty(shape.max_len, D).normal_(std=0.02))
        self.drop = nn.Dropout(p)
        layer = nn.TransformerEncoderLayer(D, shape.num_heads, 4 * D, p, activation=shape.activation, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, shape.num_layers, norm=nn.LayerNorm(D), enable_nested_tensor=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns `[B, D]` from `[B, T, D]`, padded on the left."""
        age = torch.arange(x.shape[1] - 1, -1, -1)
        padding = age >= lengths.clamp_min(1)[:, None]
        x = self.drop(x + self.positions[: x.shape[1]].flip(0))
        return masked_mean(self.layers(x, src_key_padding_mask=padding), ~padding, lengths)


class MeanEncoder(nn.Module):
    """The mean over the real positions."""

    left = False

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns `[B, D]` from `[B, T, D]`."""
        return masked_mean(x, torch.arange(x.shape[1]) < lengths[:, None], lengths)


def masked_mean(x: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """Returns the mean over the real positions, `[B, D]`."""
    return (x * real[:, :, None]).sum(1) / lengths.clamp_min(1)[:, None]


PADDED_ENCODERS: dict[str, type[GRUEncoder] | type[AttentionEncoder] | type[MeanEncoder]] = {
    "gru": GRUEncoder,
    "self_attention": AttentionEncoder,
    "mean": MeanEncoder,
}


class PaddedModel(nn.Module):
    """Padded histories in, one logit a sample out.

    Args:
        encoder: a name of PADDED_ENCODERS.
        num_rows: rows of the item table (`V`).
        shape: widths and layers.
        sparse: gradients of the table hold the looked-up rows only.
    """

    def __init__(self, encoder: str, num_rows: int, shape: ModelShape, *, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(num_rows, shape.dim, padding_idx=0, sparse=sparse)
        self.encoder = PADDED_ENCODERS[encoder](shape)
        self.head = nn.Sequential(nn.Linear(shape.dim, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.normal_(self.items.weight, std=0.02)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Returns logits `[B]` from items int64 `[B, T]` and lengths int64 `[B]`."""
        pooled = self.encoder(self.items(items), lengths)
        pooled = pooled * (lengths > 0)[:, None]  # an empty history has no vector, not that of a padding row
        return cast("Tensor", self.head(pooled))[:, 0]


class RowWiseAdagrad:
    """Adagrad with one state a row on coalesced sparse gradients: the table update that does not touch every row.

    Args:
        weight: `[V, D]`, of an `nn.Embedding(sparse=True)`.
        lr: learning rate.
        eps: added to the root of the state.
    """

    def __init__(self, weight: nn.Parameter, lr: float, eps: float = 1e-8) -> None:
        self.weight, self.lr, self.eps = weight, lr, eps
        self.state = torch.zeros(weight.shape[0])

    @torch.no_grad()
    def step(self) -> None:
        """Updates the rows that have a gradient and forgets it."""
        assert self.weight.grad is not None
        gradient = self.weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        self.state.index_add_(0, rows, values.square().mean(1))
        self.weight.index_add_(0, rows, values * (-self.lr / (self.state[rows].sqrt_() + self.eps))[:, None])
        self.weight.grad = None


class PaddedSide:
    """Trains a PaddedModel step by step.

    Args:
        model: the model; with a sparse table it is trained by row-wise Adagrad and the rest by Adam, otherwise everything by Adam.
        loader: from `build_loader`, iterated again and again.
        lr: of Adam.
        table_lr: of row-wise Adagrad.
        fused: Adam in torch's fused kernel, which has to be asked for; otherwise as `torch.optim.Adam(parameters)` gives it.
    """

    def __init__(self, model: PaddedModel, loader: DataLoader[Batch], lr: float, table_lr: float, *, fused: bool = False) -> None:
        self.model, self.batches = model.train(), _forever(loader)
        table = cast("nn.Parameter", model.items.weight)
        self.table = RowWiseAdagrad(table, table_lr) if model.items.sparse else None
        dense = [p for p in model.parameters() if self.table is None or p is not table]
        self.optimizer = torch.optim.Adam(dense, lr=lr, fused=fused or None)

    def step(self) -> int:
        """Trains on the next batch; returns its valid tokens."""
        batch = next(self.batches)
        self.optimizer.zero_grad()
        logits = self.model(batch["items"], batch["lengths"])
        F.binary_cross_entropy_with_logits(logits, batch["labels"]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.table is not None:
            self.table.step()
        return int(batch["lengths"].sum())


class PaddedLoading:
    """Builds padded batches and throws them away.

    Args:
        loader: from `build_loader`.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self.batches = _forever(loader)

    def step(self) -> int:
        """Builds the next batch; returns its valid tokens."""
        return int(next(self.batches)["lengths"].sum())


def _forever(loader: DataLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader
