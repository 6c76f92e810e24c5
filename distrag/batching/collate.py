"""Sample numbers to a RaggedBatch: every key and number of one rank's share of a step, gathered from the store without a loop in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distrag.batch import RaggedBatch
from distrag.batching.gather import (
    all_known,
    count_known,
    measure,
    take_gap_buckets,
    take_ids,
    take_log_gaps,
    take_next,
    take_numbers,
    take_rows,
)
from distrag.batching.negatives import position_negatives, shared_negatives
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrag.batching.compiled import Column, Floats, Ints
    from distrag.data.config import DataConfig
    from distrag.data.schema import Feature
    from distrag.data.split import View
    from distrag.data.store import Store

Negatives = Literal["none", "per_position", "shared"]
Part = Literal["history", "gap", "next", "negative", "context"]

_NO_SAMPLES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of the KeyedJaggedTensor: `slope` ids for each history position and `fixed` for each sample."""

    name: str
    part: Part
    column: Column
    num_rows: int
    slope: int
    fixed: int


class Collate:
    """Builds RaggedBatches of one task from one store; the same keys in the same order in every batch.

    Keys: the history ids by name, `<target>:next` (one id a sample, row 0 where nothing follows), `<target>:negative`, `<time>:gap`
    and the context ids by name. Negatives are drawn for training batches only; elsewhere their key is there with no ids.

    Args:
        store: opened store.
        config: which features, which target.
        task: `next_item` or `conversion`.
        negatives: `per_position` draws for each position what its user never met, `shared` once for the step, `none` has no such key.
        num_negatives: draws a position, or a step (`N`).
        seed: seed of the draws.
        key_order: all keys in the order the batch shall have; otherwise history, next, negative, gaps, context.

    Attributes:
        keys: the keys in their order.
        table_rows: rows of the table behind each key.
        count: counts the samples of a view; another one where a rank cannot read all of them.

    Raises:
        ValueError: for features the store does not have, a target that is no id of the history, or a `key_order` with other keys.
    """

    def __init__(
        self,
        store: Store,
        config: DataConfig,
        *,
        task: str,
        negatives: Negatives = "none",
        num_negatives: int = 0,
        seed: int = 0,
        key_order: Sequence[str] | None = None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "store": store,
            "config": config,
            "task": task,
            "negatives": negatives,
            "num_negatives": num_negatives,
            "seed": seed,
            "key_order": key_order,
        }
        self.store, self.task, self.negatives = store, task, negatives
        self.num_negatives, self.seed = num_negatives, seed % 2**63
        history, context = _chosen(config.history, store.schema.history), _chosen(config.context, store.schema.context)
        self.target = _target(config, history) if task == "next_item" else None
        self._keys = _ordered(self._build_keys(history, context), key_order)
        self.keys = tuple(key.name for key in self._keys)
        self.table_rows = {key.name: key.num_rows for key in self._keys}
        self._slope = np.array([key.slope for key in self._keys], np.int64)
        self._fixed = np.array([key.fixed for key in self._keys], np.int64)
        self._numbers = [(take_numbers if f.kind == "number" else take_log_gaps, store.position(f.name)) for f in history if _is_number(f)]
        self._context = [store.context(f.name) for f in context if f.kind == "number"]
        self.count: Callable[[View], Floats] = self._count
        self._counted: dict[int, tuple[View, Floats]] = {}

    def _build_keys(self, history: list[Feature], context: list[Feature]) -> list[_Key]:
        store, schema = self.store, self.store.schema

        def rows(feature: Feature) -> int:
            assert feature.table is not None
            return schema.table(feature.table).num_rows

        keys = [_Key(f.name, "history", store.position(f.name), rows(f), 1, 0) for f in history if f.kind == "id"]
        if self.target is not None:
            column, num_rows, name = store.position(self.target.name), rows(self.target), self.target.name
            keys.append(_Key(f"{name}:next", "next", column, num_rows, 0, 1))
            if self.negatives != "none":
                if num_rows < 2:
                    todo = "prepare the store again from data that has items"
                    raise problem(
                        "The catalogue is empty", got=0, wanted="at least 1 item", where=f"table {self.target.table!r}", todo=todo
                    )
                keys.append(_Key(f"{name}:negative", "negative", column, num_rows, 0, 0))
        keys += [_Key(f"{f.name}:gap", "gap", store.position(f.name), rows(f), 1, 0) for f in history if f.gap == "bucket"]
        return keys + [_Key(f.name, "context", store.context(f.name), rows(f), 0, 1) for f in context if f.kind == "id"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as its arguments, so that a worker process maps the store itself."""
        return _rebuilt, (self._arguments,)

    def __call__(
        self,
        view: View,
        samples: Ints,
        *,
        step: int = 0,
        epoch: int = 0,
        global_count: float = 0.0,
        num_tokens_global: int = 0,
        training: bool = True,
    ) -> RaggedBatch:
        """Returns the batch of `samples`; of one dummy of length 0 and weight 0 when there are none.

        Args:
            view: the samples' windows.
            samples: sample numbers in the view, integers `[B]`.
            step: number of the global step.
            epoch: number of the epoch.
            global_count: what the loss of this step divides by, over all ranks.
            num_tokens_global: history positions of this step over all ranks.
            training: whether negatives are drawn.

        Raises:
            ValueError: for an id outside its table, naming the feature, the sample and the position.
        """
        samples = np.array(samples, np.int64)
        self.store.check_held(view.rows[samples])
        B, K = max(len(samples), 1), len(self._keys)
        offsets, starts, lengths = np.zeros(B + 1, np.int64), np.empty(len(samples), np.int64), np.empty((K, B), np.int64)
        if len(samples):
            P = measure(view.begin, view.end, samples, self._slope, self._fixed, offsets, starts, lengths)
        else:
            P, lengths[:, 0] = 0, self._fixed
        sizes = self._sizes(P, B, lengths, offsets, training)
        values = np.empty(sum(sizes), np.int64) if len(samples) else np.zeros(sum(sizes), np.int64)
        self._fill_all(view, samples, starts, offsets, lengths, sizes, step, epoch, values)
        numbers, context, labels, weights = self._floats(view, samples, starts, offsets, P)
        ids = KeyedJaggedTensor(
            keys=list(self.keys),
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=B,
            length_per_key=sizes,
        )
        return RaggedBatch(
            ids=ids,
            offsets=torch.from_numpy(offsets),
            numbers=numbers,
            context=context,
            labels=labels,
            weights=weights,
            samples=torch.from_numpy(samples if len(samples) else np.full(1, -1, np.int64)),
            step=step,
            epoch=epoch,
            global_count=global_count,
            num_tokens_global=num_tokens_global,
        )

    def _fill_all(
        self, view: View, samples: Ints, starts: Ints, offsets: Ints, lengths: Ints, sizes: list[int], step: int, epoch: int, values: Ints
    ) -> None:
        """Writes the ids of all keys one after the other into `values`; a dummy keeps its zeros, but draws what its step shares."""
        at = 0
        for k, (key, size) in enumerate(zip(self._keys, sizes, strict=True)):
            out = values[at : at + size]
            at += size
            if key.part == "negative":
                if size:
                    self._draw(key, view, samples, step, epoch, out)
            elif len(samples) and _fill(key, view, samples, starts, offsets, out) >= key.num_rows:
                raise _outside(key, samples, lengths[k], out)

    def _sizes(self, P: int, B: int, lengths: Ints, offsets: Ints, training: bool) -> list[int]:
        sizes = [key.slope * P + key.fixed * B for key in self._keys]
        if training and self.negatives != "none" and self.target is not None:
            k = self.keys.index(f"{self.target.name}:negative")
            if self.negatives == "shared":
                lengths[k, 0] = sizes[k] = self.num_negatives
            else:
                np.multiply(np.diff(offsets), self.num_negatives, out=lengths[k])
                sizes[k] = P * self.num_negatives
        return sizes

    def _draw(self, key: _Key, view: View, samples: Ints, step: int, epoch: int, out: Ints) -> None:
        if self.negatives == "shared":
            shared_negatives(key.num_rows, self.seed, epoch, step, out)
        else:
            windows = (view.begin, view.end, view.next, view.first)
            position_negatives(key.column, *windows, samples, self.num_negatives, key.num_rows, self.seed, epoch, out)

    def _floats(self, view: View, samples: Ints, starts: Ints, offsets: Ints, P: int) -> tuple[torch.Tensor, ...]:
        B = max(len(samples), 1)
        numbers = np.empty((P, len(self._numbers)), np.float32)
        for f, (take, column) in enumerate(self._numbers):
            take(column, starts, offsets, numbers, f)
        context, labels = np.zeros((B, len(self._context)), np.float32), np.zeros(B, np.float32)
        for f, column in enumerate(self._context):
            take_rows(column, view.rows, samples, context[:, f])
        if self.store.label is not None:
            take_rows(self.store.label, view.rows, samples, labels)
        weights = np.ones(B, np.float32) if len(samples) else np.zeros(B, np.float32)
        if self.store.weight is not None:
            take_rows(self.store.weight, view.rows, samples, weights)
        return torch.from_numpy(numbers), torch.from_numpy(context), torch.from_numpy(labels), torch.from_numpy(weights)

    def counts(self, view: View) -> Floats:
        """Returns what each sample adds to the count its loss is divided by, float64 `[n]`; see `view_counts`. Kept for each view."""
        slot = 0 if view.law is not None else id(view)  # of the views that epochs draw only the last is kept
        kept = self._counted.get(slot)
        if kept is None or kept[0] is not view:
            self._counted[slot] = kept = view, self.count(view)  # the view is kept too, or another could get its id
        return kept[1]

    def _count(self, view: View) -> Floats:
        return view_counts(view, self.store, task=self.task, target=self.target.name if self.target else None)


def view_counts(view: View, store: Store, *, task: str, target: str | None = None) -> Floats:
    """Returns what each sample adds to the count its loss is divided by, float64 `[n]`.

    Args:
        view: the samples' windows.
        store: the store they belong to.
        task: `conversion` counts the weight of a sample; `next_item` the known items it predicts, times its weight.
        target: the id feature that next_item predicts. Unknown items (row 0) weigh nothing.
    """
    weights: Floats = np.ones(len(view)) if store.weight is None else store.weight[view.rows].astype(np.float64)
    if task == "conversion":
        return weights
    assert target is not None
    feature = store.schema.feature(target)
    assert feature.table is not None
    column = store.position(target)
    # Stores written from arrays do not count their unknown ids, so a count of 0 is checked: a wrong divisor would stay silent.
    if store.schema.table(feature.table).num_unknown == 0 and all_known(column):
        counts: Floats = np.maximum(view.end - view.begin - (view.next < 0), 0).astype(np.float64)
    else:
        counts = np.empty(len(view), np.float64)
        count_known(column, view.begin, view.end, view.next, counts)
    counts *= weights
    return counts


def _rebuilt(arguments: dict[str, Any]) -> Collate:
    return Collate(**arguments)


def _chosen(names: list[str] | None, features: tuple[Feature, ...]) -> list[Feature]:
    if names is None:
        return list(features)
    known = {feature.name: feature for feature in features}
    for name in names:
        if name not in known:
            raise problem("The store has no such feature", got=name, wanted=sorted(known), where="data.history or data.context", todo=_NAME)
    return [known[name] for name in names]


_NAME = "name one of these"


def _target(config: DataConfig, history: list[Feature]) -> Feature:
    ids = [feature for feature in history if feature.kind == "id"]
    for feature in ids:
        if config.target in (None, feature.name):
            return feature
    got = config.target or "no id feature"
    raise problem("next_item predicts an id of the history", got=got, wanted=[f.name for f in ids], where="data.target", todo=_NAME)


def _is_number(feature: Feature) -> bool:
    return feature.kind == "number" or (feature.kind == "time" and feature.gap == "log")


def _ordered(keys: list[_Key], order: Sequence[str] | None) -> list[_Key]:
    known = {key.name: key for key in keys}
    if order is None:
        return keys
    if sorted(order) != sorted(known):
        todo = "build the order from the same features and loss as the batches"
        raise problem(
            "The key order has other keys than the batch", got=list(order), wanted=list(known), where="Collate(key_order=)", todo=todo
        )
    return [known[name] for name in order]


def _fill(key: _Key, view: View, samples: Ints, starts: Ints, offsets: Ints, out: Ints) -> np.uint64:
    if key.part == "history":
        return take_ids(key.column, starts, offsets, out)
    if key.part == "next":
        return take_next(key.column, view.next, samples, out)
    if key.part == "context":
        return take_rows(key.column, view.rows, samples, out)
    return take_gap_buckets(key.column, starts, offsets, out)


def _outside(key: _Key, samples: Ints, lengths: Ints, values: Ints) -> ValueError:
    bad = np.flatnonzero((values < 0) | (values >= key.num_rows))
    ends = np.cumsum(lengths)
    owner = np.searchsorted(ends, bad, side="right")
    inside = bad - (ends - lengths)[owner]
    first = inside[owner == owner[0]]
    return problem(
        "Ids outside their table",
        got=values[bad[owner == owner[0]]].tolist(),
        wanted=f"0 .. {key.num_rows - 1}",
        where=f"feature {key.name!r}, sample {int(samples[owner[0]])}, positions {first.tolist()} of its history",
        todo="map raw ids with `distrag prepare`; tables never see a raw id",
    )
