"""Raw ids become table rows: row 0 is the unknown row, a vocabulary holds the raw values in ascending order, or a hash chooses a bucket."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distrag.data.flatten import column_type, decode, integers, texts
from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

NULL = np.int64(np.iinfo(np.int64).min)
"""Code of a null id; any other negative code is an id that no table holds."""
UNKNOWN = np.int64(-1)
_MAP = 1 << 26


def hash_text(text: str, num_buckets: int) -> int:
    """Returns the row 1..num_buckets of a text that is in normal form C: blake2b of its UTF-8 bytes, 8 bytes little-endian, modulo.

    The same in every process and on every machine, unlike Python's salted `hash`. An integer is hashed as its decimal digits.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % num_buckets + 1


class TableBuilder:
    """Collects the ids of all features that share a table, then gives each its row.

    Ids pass twice: `codes` turns a batch into int64 codes while the source streams by, `rows` turns codes into rows once all are known.
    Memory grows with the vocabulary, not with the source.
    """

    def __init__(self, name: str, *, text: bool, num_buckets: int | None = None, vocabulary: pa.Array | None = None) -> None:
        """Starts a table; `text` says whether any of its features holds text, since then all ids are text."""
        self.name, self.text, self.num_buckets = name, text, num_buckets
        self._fixed = vocabulary is not None
        self._known = np.zeros(0, np.int64)
        self._seen = np.zeros(1 << 10, np.bool_)
        self._pending: list[NDArray[np.int64]] = []
        self._texts: dict[str, int] = {}
        if vocabulary is not None:
            self._start(vocabulary)
        self._lookup: NDArray[np.int64] | None = None

    def codes(self, values: pa.Array, where: str) -> NDArray[np.int64]:
        """Returns one int64 code for each value: NULL, another negative number for an id no table holds, or what `rows` understands."""
        plain = decode(values)
        if pa.types.is_string(plain.type) or pa.types.is_large_string(plain.type) or pa.types.is_string_view(plain.type):
            return self._text_codes(texts(plain))
        whole, null = integers(plain, where)
        if self.text or self.num_buckets is not None:
            codes = self._text_codes(pa.array(whole, mask=null | (whole < 0)).cast(pa.large_string()))
            codes = np.where(whole < 0, UNKNOWN, codes)
        else:
            codes = whole
            if not self._fixed:
                self._collect(whole[~null & (whole >= 0)])
        return np.where(null, NULL, codes)

    def finish(self) -> pa.Array | None:
        """Returns the vocabulary, ascending, or None for a hashed table; `rows` works from here on."""
        if self.num_buckets is not None:
            return None
        if self.text:
            words = pa.array(list(self._texts), pa.large_string())
            order = pc.sort_indices(words).to_numpy()
            self._lookup = np.empty(len(order), np.int64)
            self._lookup[order] = np.arange(1, len(order) + 1)
            return words.take(pa.array(order))
        self._merge()
        if len(self._known) and self._known[-1] < 4 * len(self._known) + (1 << 20):  # dense enough: one gather instead of a binary search
            self._lookup = np.zeros(int(self._known[-1]) + 1, np.int64)
            self._lookup[self._known] = np.arange(1, len(self._known) + 1)
        return pa.array(self._known)

    @property
    def num_rows(self) -> int:
        """Rows of the table, row 0 included; final after `finish`."""
        return 1 + (self.num_buckets if self.num_buckets is not None else len(self._texts) if self.text else len(self._known))

    def rows(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the table row of each code, int64; 0 for what the table does not hold."""
        if self.num_buckets is not None:
            return np.maximum(codes, 0)
        if self._lookup is not None:
            inside = (codes >= 0) & (codes < len(self._lookup))
            return np.where(inside, self._lookup[np.where(inside, codes, 0)], 0) if len(self._lookup) else np.zeros_like(codes)
        at = np.searchsorted(self._known, codes)
        hit = (at < len(self._known)) & (codes >= 0)
        hit[hit] = self._known[at[hit]] == codes[hit]
        return np.where(hit, at + 1, 0)

    def raw(self, code: int) -> object:
        """Returns what a code stands for, for a message."""
        if code == NULL:
            return "null"
        return "not in the vocabulary" if self.text and code < 0 else code

    def _text_codes(self, words: pa.Array) -> NDArray[np.int64]:
        encoded = words.dictionary_encode()
        if self.num_buckets is not None:
            found = [hash_text(word, self.num_buckets) for word in encoded.dictionary.to_pylist()]
        elif self._fixed:
            found = [self._texts.get(word, int(UNKNOWN)) for word in encoded.dictionary.to_pylist()]
        else:
            found = [self._texts.setdefault(word, len(self._texts)) for word in encoded.dictionary.to_pylist()]
        index = pc.fill_null(encoded.indices, len(found)).to_numpy(zero_copy_only=False)
        codes: NDArray[np.int64] = np.array([*found, NULL], np.int64)[index]
        return codes

    def _collect(self, whole: NDArray[np.int64]) -> None:
        # Small ids are marked in a bit map, 30 times faster than sorting; only ids beyond it are sorted.
        small = whole[whole < _MAP]
        if len(small) and int(small.max()) >= len(self._seen):
            grown = np.zeros(min(_MAP, 2 * int(small.max()) + 1), np.bool_)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        self._seen[small] = True
        if len(small) < len(whole):
            self._pending.append(np.unique(whole[whole >= _MAP]))
        if sum(map(len, self._pending)) > len(self._known) + (1 << 16):
            self._merge()

    def _merge(self) -> None:
        if self._fixed:
            return
        self._known = np.unique(np.concatenate([self._known, np.flatnonzero(self._seen), *self._pending]))
        self._pending = []

    def _start(self, vocabulary: pa.Array) -> None:
        if self.text:
            self._texts = {word: i for i, word in enumerate(pc.unique(texts(vocabulary).drop_null()).to_pylist())}
        else:
            whole, null = integers(vocabulary, f"vocabulary of {self.name}")
            self._known = np.unique(whole[~null & (whole >= 0)])


def read_values(spec: str) -> pa.Array:
    """Returns the values of a vocabulary file, given as `FILE` or `FILE:COLUMN`: Parquet, Arrow, or one value a line.

    Raises:
        ValueError: when the file or the column is not there.
    """
    path, column = vocabulary_file(spec)
    try:
        table = _read_table(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        got = str(error).split("\n")[0]
        raise problem("A vocabulary cannot be read", got=got, wanted="FILE or FILE:COLUMN", where=path, todo=_MEND) from error
    if not table.column_names or (column and table.column_names.count(column) != 1):
        got, wanted = column or "no column", f"one of {table.column_names}"
        raise problem("No such column in a vocabulary", got=got, wanted=wanted, where=path, todo=_MEND)
    values = decode(table.column(column or 0))
    found = column_type(values.type)
    if found.shape == "list" or found.element not in ("int", "float", "text", "null"):
        raise problem("A vocabulary is no list of ids", got=found.arrow, wanted="whole numbers or texts", where=path, todo=_MEND)
    return values


def vocabulary_file(spec: str) -> tuple[Path, str]:
    """Returns the file and the column, or '', of a vocabulary that is given as `FILE` or `FILE:COLUMN`.

    Raises:
        ValueError: there is no such file.
    """
    file, _, column = spec.rpartition(":")
    for path, name in ((spec, ""), (file, column)):
        if os.path.isfile(path):
            return Path(path), name
    got = "a folder" if os.path.isdir(spec) else "no such file"
    raise problem("A vocabulary cannot be read", got=got, wanted="FILE or FILE:COLUMN", where=spec, todo=_MEND)


_MEND = "mend `vocabulary` of the table in the schema"


def _read_table(path: Path) -> pa.Table:
    if path.suffix == ".arrow":
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            return reader.read_all()
    if path.suffix in (".parquet", ".pq"):
        import pyarrow.parquet as pq

        return pq.read_table(path)
    lines = pa.array(path.read_text(encoding="utf-8").splitlines())
    try:
        return pa.table({"value": lines.cast(pa.int64())})
    except pa.ArrowInvalid:
        return pa.table({"value": lines})
