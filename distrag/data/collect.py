"""Columns on their way into a store: raw values go to flat files while the source streams by, and are mapped once statistics are known."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from distrag.data.flatten import numbers, seconds, ticks
from distrag.data.schema import Feature, id_dtype
from distrag.data.vocabulary import NULL
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from numpy.typing import NDArray

    from distrag.data.recipe import FeatureRecipe
    from distrag.data.vocabulary import TableBuilder

_CHUNK = 1 << 20


class Spool:
    """Flat arrays on disk that grow at the end and are then mapped; memory stays flat however long they get."""

    def __init__(self, folder: Path) -> None:
        """Keeps its files in `folder`, which it makes and removes."""
        folder.mkdir()
        self._folder = folder
        self._count = 0
        self._files: dict[str, tuple[Any, np.dtype[Any]]] = {}

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Adds values at the end of the array called `name`; the first call fixes the dtype."""
        if name not in self._files:
            self._count += 1
            self._files[name] = ((self._folder / f"{self._count}.raw").open("w+b"), values.dtype)
        file, dtype = self._files[name]
        assert values.dtype == dtype, (name, values.dtype, dtype)
        file.write(np.ascontiguousarray(values).data if len(values) else b"")

    def read(self, name: str) -> NDArray[Any]:
        """Returns the whole array called `name`, mapped read-only."""
        file, dtype = self._files[name]
        file.flush()
        return np.memmap(file.name, dtype, "r") if file.tell() else np.zeros(0, dtype)

    def map(self, name: str, to: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Writes `change` of the array called `name` as the array called `to`, chunk by chunk, and drops the old one."""
        values = self.read(name)
        self.append(to, change(values[:0]))
        for start in range(0, len(values), _CHUNK):
            self.append(to, change(values[start : start + _CHUNK]))
        file, _ = self._files.pop(name)
        file.close()
        Path(file.name).unlink()

    def __enter__(self) -> Self:
        """Returns the spool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes and deletes everything; arrays already mapped stay readable."""
        for file, _ in self._files.values():
            file.close()
        shutil.rmtree(self._folder)


@dataclass
class Ids:
    """An id feature: codes now, table rows at the end."""

    recipe: FeatureRecipe
    column: str
    table: TableBuilder

    def add(self, spool: Spool, values: pa.Array, order: NDArray[np.int64] | None, where: str) -> None:
        """Spools the codes of one batch."""
        codes = self.table.codes(values, where)
        spool.append(f"raw {self.column}", codes if order is None else codes[order])

    def finish(self, spool: Spool) -> Feature:
        """Returns the finished feature; its table must be finished."""
        dtype = np.dtype(id_dtype(self.table.num_rows))
        num_null = num_unknown = 0

        def change(codes: NDArray[np.int64]) -> NDArray[Any]:
            nonlocal num_null, num_unknown
            rows, null = self.table.rows(codes), codes == NULL
            num_null += int(null.sum())
            num_unknown += int(((rows == 0) & ~null).sum())
            return rows.astype(dtype)

        spool.map(f"raw {self.column}", self.column, change)
        name, column = self.recipe.name, self.recipe.column
        return Feature(name, "id", dtype.name, table=self.table.name, num_null=num_null, num_unknown=num_unknown, column=column)

    def unknown(self, spool: Spool) -> tuple[int, NDArray[np.int64], list[object]] | None:
        """Returns the first index that has no row, with all indices up to a chunk after it and their raw ids; None when all have one."""
        codes = spool.read(f"raw {self.column}")
        for start in range(0, len(codes), _CHUNK):
            part = np.asarray(codes[start : start + _CHUNK])
            bad = np.flatnonzero(self.table.rows(part) == 0)
            if len(bad):
                return int(start + bad[0]), start + bad, [self.table.raw(int(c)) for c in part[bad[:100]]]
        return None


@dataclass
class Numbers:
    """A number: float64 now, normalised float32 at the end."""

    recipe: FeatureRecipe
    column: str
    count: int = 0
    num_null: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, spool: Spool, values: pa.Array, order: NDArray[np.int64] | None, where: str) -> None:
        """Spools one batch and merges its mean and squared deviations into the running ones (Chan, Golub, LeVeque 1983)."""
        plain = numbers(values, where)
        if self.recipe.transform == "log":
            plain = np.sign(plain) * np.log1p(np.abs(plain))
        known = plain[~np.isnan(plain)]
        self.num_null += len(plain) - len(known)
        if len(known):
            mean, total = float(known.mean()), self.count + len(known)
            delta = mean - self.mean
            self.squares += float(np.square(known - mean).sum()) + delta**2 * self.count * len(known) / total
            self.mean += delta * len(known) / total
            self.count = total
        spool.append(f"raw {self.column}", plain if order is None else plain[order])

    def finish(self, spool: Spool) -> Feature:
        """Returns the finished feature; what was null lies at the mean."""
        std = (self.squares / self.count) ** 0.5 if self.count else 0.0
        # A column of one value leaves only rounding in its deviations; dividing by that would blow it up.
        std = std if std > 1e-12 * max(1.0, abs(self.mean)) else 1.0
        as_is = self.recipe.transform == "none"
        shift, scale = (0.0, 1.0) if as_is else (self.mean, std)
        fill = np.float32(self.mean) if as_is else np.float32(0)

        def change(plain: NDArray[np.float64]) -> NDArray[np.float32]:
            scaled = ((plain - shift) / scale).astype(np.float32)
            return np.where(np.isnan(scaled), fill, scaled)

        spool.map(f"raw {self.column}", self.column, change)
        name, column = self.recipe.name, self.recipe.column
        return Feature(
            name, "number", "float32", transform=self.recipe.transform, mean=shift, std=scale, num_null=self.num_null, column=column
        )


@dataclass
class Times:
    """A time: int64 seconds from the start, no float in between."""

    recipe: FeatureRecipe
    column: str
    num_null: int = 0

    def read(self, values: pa.Array, lengths: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        """Returns int64 seconds; a null takes the time of the event before it in its row, the first ones that of the first known one."""
        times, null = seconds(values, self.recipe.unit, where)
        self.num_null += int(null.sum())
        return _fill_times(times, null, lengths) if null.any() else times

    def order(self, values: pa.Array, lengths: NDArray[np.int64], where: str) -> NDArray[np.int64] | None:
        """Returns what `time_order` gives for these times as finely as they are written: events within one second keep apart."""
        fine, null, _per_second = ticks(values, self.recipe.unit, where)
        return time_order(_fill_times(fine, null, lengths) if null.any() else fine, lengths)

    def add(self, spool: Spool, times: NDArray[np.int64], order: NDArray[np.int64] | None) -> None:
        """Spools one batch of seconds."""
        spool.append(self.column, times if order is None else times[order])

    def finish(self) -> Feature:
        """Returns the finished feature."""
        table = f"{self.recipe.name}:gap" if self.recipe.gap == "bucket" else None
        gap, name, column = self.recipe.gap, self.recipe.name, self.recipe.column
        return Feature(name, "time", "int64", table=table, gap=gap, num_null=self.num_null, column=column)


def time_order(times: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Returns the indices that sort each row by time, equal times in their present order; None when all rows are sorted already."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if not bool(((times[1:] < times[:-1]) & (rows[1:] == rows[:-1])).any()):
        return None
    return np.lexsort((times, rows))


def per_sample(values: pa.Array, what: str, where: str, first: int) -> NDArray[np.float32]:
    """Returns labels or weights of one batch as float32.

    Raises:
        ValueError: when one is null or not finite, or a weight is negative: neither can be guessed.
    """
    plain = numbers(values, where)
    bad = np.flatnonzero(np.isnan(plain) | ((plain < 0) & (what == "weight")))
    if len(bad):
        row, wanted = int(bad[0]), "a finite number" + (" from 0 on" if what == "weight" else "")
        got, todo = values[row].as_py(), "mend or drop these rows in the source"
        raise problem(f"Not a {what}", got=got, wanted=wanted, where=f"{where}, row {first + row}", todo=todo)
    return plain.astype(np.float32)


def _fill_times(times: NDArray[Any], null: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[Any]:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    row = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(times))
    before = np.maximum.accumulate(np.where(null, -1, index))
    after = np.minimum.accumulate(np.where(null, len(times), index)[::-1])[::-1]
    has_before, has_after = before >= offsets[row], after < offsets[row + 1]
    source = np.where(has_before, before, np.where(has_after, after, -1))
    return np.where(source >= 0, times[np.maximum(source, 0)], times.dtype.type(0))
