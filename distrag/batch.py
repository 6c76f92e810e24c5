"""RaggedBatch, the one type that crosses rooms, and the legend of shapes.

Legend: B sequences in the local batch, L length of one, sum_L positions in the local batch, F per-position numbers, Fc context numbers,
D width, H heads, N negatives, V rows of the item table, W ranks, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torchrec import KeyedJaggedTensor


@dataclass(frozen=True)
class RaggedBatch:
    """One rank's share of one global step: values and lengths, nothing padded.

    Attributes:
        ids: every id feature under its key, in one fixed key order; `B` lengths a key, values and lengths int64.
        offsets: int64 `[B+1]`, where each history starts in the flat per-position tensors.
        numbers: float32 `[sum_L, F]`, per-position numbers, already normalised.
        context: float32 `[B, Fc]`, per-sample numbers, already normalised.
        labels: float32 `[B]`.
        weights: float32 `[B]`, 0 for a dummy sample.
        samples: int64 `[B]`, sample numbers in the view; -1 for a dummy sample of length 0.
        step: number of the global step in its epoch.
        epoch: number of the epoch.
        global_count: sum over all ranks of what the loss of this global step divides by; known from the plan.
        num_tokens_global: history positions of this global step over all ranks.
    """

    ids: KeyedJaggedTensor
    offsets: torch.Tensor
    numbers: torch.Tensor
    context: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    samples: torch.Tensor
    step: int = 0
    epoch: int = 0
    global_count: float = 0.0
    num_tokens_global: int = 0

    @property
    def num_samples(self) -> int:
        """Sequences in this batch, dummies included (`B`)."""
        return int(self.samples.shape[0])

    @property
    def num_tokens(self) -> int:
        """History positions in this batch (`sum_L`)."""
        return int(self.numbers.shape[0])

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each history, int64 `[B]`."""
        return self.offsets.diff()

    def _each(self, change: Callable[[Any], Any]) -> Self:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)[:7]}
        return replace(self, **{name: change(value) for name, value in tensors.items()})

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the batch on `device`; with pinned memory and `non_blocking` the copy overlaps."""
        return self._each(lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the batch in page-locked memory."""
        return self._each(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of every tensor alive until `stream` has used it."""
        self._each(lambda t: t.record_stream(stream) or t)

    def cut(self, bounds: Sequence[int], shared: str = "") -> list[Part]:
        """Returns the batch in parts of neighbouring samples, and where each key of a part lies in the values of the whole.

        Args:
            bounds: first sample of each part, and `B` at the end; rising.
            shared: key whose ids belong to the step and not to a sample: every part has all of them.
        """
        keys = list(self.ids.keys())
        offsets = torch.stack([torch.nn.functional.pad(self.ids[key].lengths().cumsum(0), (1, 0)) for key in keys])
        edges = offsets[:, list(bounds)].tolist()
        starts = self.offsets[list(bounds)].tolist()
        return [
            self._part(bounds[p : p + 2], starts[p : p + 2], [edge[p : p + 2] for edge in edges], shared) for p in range(len(bounds) - 1)
        ]

    def _part(self, samples: Sequence[int], positions: Sequence[int], edges: list[list[int]], shared: str) -> Part:
        from torchrec import KeyedJaggedTensor

        keys, rows, along = list(self.ids.keys()), slice(*samples), slice(*positions)
        where = {key: slice(None) if key == shared else slice(*edge) for key, edge in zip(keys, edges, strict=True)}
        lengths = {key: self.ids[key].lengths()[rows] for key in keys}
        if shared:
            lengths[shared] = torch.zeros_like(lengths[shared])
            lengths[shared][0] = len(self.ids[shared].values())
        ids = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([self.ids[key].values()[where[key]] for key in keys]),
            lengths=torch.cat([lengths[key] for key in keys]),
            stride=samples[1] - samples[0],
        )
        part = replace(
            self,
            ids=ids,
            offsets=self.offsets[samples[0] : samples[1] + 1] - positions[0],
            numbers=self.numbers[along],
            context=self.context[rows],
            labels=self.labels[rows],
            weights=self.weights[rows],
            samples=self.samples[rows],
        )
        return Part(part, where)

    def check(self, table_rows: Mapping[str, int] | None = None) -> None:
        """Verifies every invariant; debug mode calls it for each batch.

        Args:
            table_rows: rows of the table behind each key; ids are checked against it when given.

        Raises:
            ValueError: naming the first field, sample and value that breaks an invariant.
        """
        _check_shapes(self)
        _check_lengths(self)
        _check_finite(self)
        _check_weights(self)
        _check_ids(self, table_rows or {})


@dataclass(frozen=True)
class Part:
    """Some neighbouring samples of a batch.

    Attributes:
        batch: they as a batch of their own.
        where: key -> its slice of the key's values in the whole batch.
    """

    batch: RaggedBatch
    where: dict[str, slice]


def save_batch(batch: RaggedBatch, path: Path) -> None:
    """Writes a batch to a file that `load_batch` reads, and `torch.load(weights_only=True)` too: plain tensors and numbers."""
    flat = {f.name: getattr(batch, f.name) for f in fields(batch)[1:]}
    ids = {key: (batch.ids[key].values(), batch.ids[key].lengths()) for key in batch.ids.keys()}  # noqa: SIM118 - no mapping
    torch.save({"ids": ids, **flat}, path)


def load_batch(path: Path | str) -> RaggedBatch:
    """Returns the batch that `save_batch` wrote, on the CPU."""
    from torchrec import KeyedJaggedTensor

    flat = torch.load(path, map_location="cpu", weights_only=True)
    ids = flat.pop("ids")
    values, lengths = (torch.cat([pair[k] for pair in ids.values()]) for k in (0, 1))
    stride = len(flat["samples"])
    return RaggedBatch(KeyedJaggedTensor(keys=list(ids), values=values, lengths=lengths, stride=stride), **flat)


def _check_shapes(batch: RaggedBatch) -> None:
    B = batch.num_samples
    wanted = {"offsets": B + 1, "context": B, "labels": B, "weights": B}
    for name, size in wanted.items():
        got = getattr(batch, name).shape[0]
        if got != size:
            raise problem("A field of the batch has the wrong size", got=got, wanted=size, where=f"RaggedBatch.{name}", todo=_BUILD)


_BUILD = "build the batch with batching.collate, or make this field agree with `samples` and `offsets`"


def _check_lengths(batch: RaggedBatch) -> None:
    lengths = batch.lengths
    if int(batch.offsets[0]) != 0 or bool((lengths < 0).any()) or int(batch.offsets[-1]) != batch.num_tokens:
        raise problem(
            "Offsets do not describe the positions",
            got=f"first {int(batch.offsets[0])}, last {int(batch.offsets[-1])}, shortest length {min(lengths.tolist(), default=0)}",
            wanted=f"first 0, never falling, last {batch.num_tokens}",
            where="RaggedBatch.offsets",
            todo=_BUILD,
        )
    dummies = batch.samples < 0
    if bool((batch.weights[dummies] != 0).any()) or bool((lengths[dummies] != 0).any()):
        raise problem(
            "A dummy sample carries weight or positions",
            got=batch.weights[dummies].tolist(),
            wanted=0,
            where="RaggedBatch.weights",
            todo=_BUILD,
        )


def _check_weights(batch: RaggedBatch) -> None:
    bad = (batch.weights < 0).nonzero()[:, 0]
    if len(bad):
        where = f"RaggedBatch.weights[{int(bad[0])}], sample {int(batch.samples[bad[0]])}"
        todo = "mend the weight column of the source and run `distrag prepare` again"
        raise problem("A weight is negative", got=batch.weights[bad[0]].item(), wanted="0 or more", where=where, todo=todo)


def _check_finite(batch: RaggedBatch) -> None:
    for name in ("numbers", "context", "labels", "weights"):
        bad = (~torch.isfinite(getattr(batch, name))).nonzero()
        if len(bad):
            where = f"RaggedBatch.{name}{bad[0].tolist()}, sample {_sample_of(batch, name, int(bad[0, 0]))}"
            todo = "mend or drop the row in the source and run `distrag prepare` again"
            raise problem("A number is not finite", got=getattr(batch, name)[tuple(bad[0])].item(), wanted="finite", where=where, todo=todo)


def _sample_of(batch: RaggedBatch, name: str, row: int) -> int:
    if name == "numbers":
        row = int(torch.searchsorted(batch.offsets, row, right=True)) - 1
    return int(batch.samples[row])


def _check_ids(batch: RaggedBatch, table_rows: Mapping[str, int]) -> None:
    for key in batch.ids.keys():  # noqa: SIM118 - a KeyedJaggedTensor is no mapping
        jagged = batch.ids[key]
        values, lengths = jagged.values(), jagged.lengths()
        if bool((lengths < 0).any()) or int(lengths.sum()) != len(values) or len(lengths) != batch.num_samples:
            got = f"{len(values)} values, lengths sum to {int(lengths.sum())} over {len(lengths)} samples"
            raise problem("Lengths of a key do not describe its values", got=got, wanted="equal", where=f"key {key!r}", todo=_BUILD)
        rows = table_rows.get(key)
        if values.dtype != torch.int64 or lengths.dtype != torch.int64:
            got = f"values {values.dtype}, lengths {lengths.dtype}"
            raise problem("Ids of another integer type", got=got, wanted="int64 both, on every rank", where=f"key {key!r}", todo=_BUILD)
        bad = ((values < 0) | (values >= rows)).nonzero()[:, 0] if rows is not None else values[:0]
        if len(bad):
            sample = int(torch.searchsorted(lengths.cumsum(0), bad[0], right=True))
            where = f"key {key!r}, sample {int(batch.samples[sample])}, positions {bad[:10].tolist()} of the batch"
            todo = "map raw ids with `distrag prepare`; tables never see a raw id"
            raise problem(
                "Ids outside their table", got=values[bad[:10]].tolist(), wanted=f"0 .. {rows - 1 if rows else 0}", where=where, todo=todo
            )
