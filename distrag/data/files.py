"""Where rows come from: Parquet files streamed in batches, or a table in memory; types agreed over all files before a row is read."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distrag.data.flatten import ColumnType, column_type, unify
from distrag.problem import problem

Batch = Mapping[str, pa.Array]
PARQUET = (".parquet", ".pq", ".parq")
TEXT = (".csv", ".tsv", ".inter", ".csv.gz", ".tsv.gz")


@dataclass(frozen=True)
class Rows:
    """Rows of a source that can be streamed.

    Attributes:
        types: class of each column over all files.
        batches: given column names, yields `(file, number of the first row in it, columns)` from first to last.
        provenance: what was read, with a hash of the content of each file.
        roles: columns known to be the `user`, `item` or `time`, whatever they are called.
    """

    types: Mapping[str, ColumnType]
    batches: Callable[[Sequence[str]], Iterator[tuple[str, int, Batch]]]
    provenance: Mapping[str, Any]
    roles: Mapping[str, str] = field(default_factory=dict)


def find_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Returns the files that a path, a folder, a glob or a list of these names, sorted within each; hidden ones are skipped.

    Raises:
        ValueError: when one of them names nothing.
    """
    if not isinstance(source, (str, Path)):
        return [path for part in source for path in find_files(part)]
    check_path(source)
    path = Path(source)
    if os.path.isfile(path):
        return [path]
    folder = os.path.isdir(path)
    found = _walk(path) if folder else sorted(Path(p) for p in glob.glob(str(source), recursive=True))
    files = [p for p in found if not p.name.startswith((".", "_")) and os.path.isfile(p)]
    if folder:
        files = [p for p in files if p.name.lower().endswith(PARQUET)] or [p for p in files if p.name.lower().endswith(TEXT)]
    if not files:
        wanted = f"files ending in {', '.join(PARQUET + TEXT)}"
        raise problem(
            "No file found",
            got="nothing",
            wanted=wanted,
            where=source,
            todo="mend the path or the glob, or name a source: ml-100k, synthetic",
        )
    return files


def check_path(path: str | Path) -> None:
    """Refuses a path that is empty, holds a name that is too long, or is no UTF-8, which Arrow cannot open.

    Raises:
        ValueError: it is.
    """
    text = str(path)
    long = any(len(name.encode(errors="replace")) > 255 for name in text.split("/"))
    if not text.strip() or "\0" in text or long or text != text.encode(errors="replace").decode():
        raise problem(
            "A path that cannot be used",
            got=f"{text!r:.300}",
            wanted="UTF-8 text, names of at most 255 bytes",
            where="the command line",
            todo="rename the file or folder",
        )


def _walk(folder: Path) -> list[Path]:
    """Returns what lies in a folder and below it, sorted; a folder that links lead to twice is entered once."""
    found: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for base, folders, files in os.walk(folder, followlinks=True):
        facts = os.stat(base)
        if (facts.st_dev, facts.st_ino) in entered:
            folders.clear()
            continue
        entered.add((facts.st_dev, facts.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += (Path(base, name) for name in files)
        if len(found) > _MOST_FILES:
            todo = "name a folder that holds nothing else, or a glob"
            raise problem("Too many files in a folder", got=f"over {_MOST_FILES:,}", wanted="a folder of data", where=folder, todo=todo)
    return sorted(found)


_MOST_FILES = 200_000


def is_parquet(path: Path) -> bool:
    """Returns whether a file is Parquet, by its name or its first four bytes."""
    if path.name.lower().endswith(PARQUET):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False  # whoever reads it next says what is wrong with it


def parquet_rows(files: Sequence[Path], read_rows: int) -> Rows:
    """Returns the rows of Parquet files; at most `read_rows` rows are in memory at once.

    Raises:
        ValueError: when a file cannot be read, or columns of two files do not fit together.
    """
    found: dict[str, tuple[ColumnType, Path]] = {}
    for file in files:
        schema = _open(file).schema_arrow
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            todo = "write the file again with each name once"
            raise problem("Two columns of one name", got=twice, wanted="each once", where=file, todo=todo)
        types = {name: column_type(schema.field(i).type) for i, name in enumerate(schema.names)}
        _merge_types(found, types, file, first=file == files[0])

    def batches(columns: Sequence[str]) -> Iterator[tuple[str, int, Batch]]:
        for file in files:
            yield from _parquet_batches(file, columns, read_rows)

    return Rows({name: kind for name, (kind, _) in found.items()}, batches, {"files": [file_facts(f) for f in files]})


def table_rows(
    table: pa.Table, read_rows: int, provenance: Mapping[str, Any], where: str = "table in memory", roles: Mapping[str, str] | None = None
) -> Rows:
    """Returns the rows of a table that is in memory, slice by slice."""

    def batches(columns: Sequence[str]) -> Iterator[tuple[str, int, Batch]]:
        chosen, first = table.select(list(columns)), 0
        for batch in chosen.to_batches(max_chunksize=read_rows):
            yield where, first, dict(zip(batch.schema.names, batch.columns, strict=True))
            first += batch.num_rows

    types = {name: column_type(table.schema.field(i).type) for i, name in enumerate(table.column_names)}
    return Rows(types, batches, provenance, roles or {})


def hash_table(table: pa.Table) -> str:
    """Returns a hash of the rows of a table, whatever its chunks."""
    digest = hashlib.blake2b(digest_size=16)
    with pa.ipc.new_stream(_Digest(digest), table.schema.remove_metadata()) as writer:
        writer.write_table(table.replace_schema_metadata(None).combine_chunks())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Returns the blake2b hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """Returns name, size and hash of a file, for the provenance."""
    return {"name": path.name, "bytes": path.stat().st_size, "blake2b": hash_file(path)}


class _Digest:
    """A file that keeps the hash of what is written to it and nothing else."""

    closed = False

    def __init__(self, digest: Any) -> None:
        self.write = digest.update

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        todo = "write or copy the file again, or leave it out of the source"
        raise problem("Not readable as Parquet", got=str(error).split("\n")[0], wanted="a Parquet file", where=file, todo=todo) from error


def _parquet_batches(file: Path, columns: Sequence[str], read_rows: int) -> Iterator[tuple[str, int, Batch]]:
    first = 0
    with _open(file) as reader:
        try:
            for batch in reader.iter_batches(batch_size=read_rows, columns=list(columns)):
                yield str(file), first, {name: batch.column(name) for name in columns}
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            where, todo = f"{file}, after row {first}", "write or copy the file again"
            raise problem(
                "Parquet data is damaged", got=str(error).split("\n")[0], wanted="readable pages", where=where, todo=todo
            ) from error


def _merge_types(found: dict[str, tuple[ColumnType, Path]], types: Mapping[str, ColumnType], file: Path, *, first: bool) -> None:
    if not first and set(types) != set(found):
        missing, new = sorted(set(found) - set(types)), sorted(set(types) - set(found))
        # A column that some file lacks cannot be a feature; a recipe that wants it is told by the reader of that file's type here.
        for name in missing:
            found[name] = (ColumnType("scalar", "other", f"missing in {file.name}"), file)
        for name in new:
            types = {**types, name: ColumnType("scalar", "other", f"only in some files, such as {file.name}")}
    for name, kind in types.items():
        if name not in found:
            found[name] = (kind, file)
            continue
        before, where = found[name]
        merged = unify(before, kind) if "other" not in (before.element, kind.element) else (kind if kind.element == "other" else before)
        if merged is None:
            got = f"{before.arrow} in {where}, {kind.arrow} in {file}"
            raise problem(
                "Types of a column differ",
                got=got,
                wanted="one type",
                where=f"{file}, column {name!r}",
                todo="write the files with one type",
            )
        found[name] = (merged, file if merged is kind else where)
