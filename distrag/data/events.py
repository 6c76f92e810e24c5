"""A CSV of (user, item, time, ...) events as one row a user with lists, grouped by a stable sort."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from distrag.data.files import Rows, file_facts, table_rows
from distrag.data.recipe import ITEMS, TIMES, USERS
from distrag.problem import problem

_NULLS = ["", "null", "NULL", "nan", "NaN"]


def event_rows(
    files: Sequence[Path], roles: Mapping[str, str], per_user: Sequence[str], read_rows: int, header: Sequence[str] | None = None
) -> Rows:
    """Returns one row a user, in ascending order of the user, with the events of all files in file order.

    Args:
        files: CSV or TSV files with the same columns; the delimiter is read off the first line.
        roles: names of the columns `user`, `item` and `time`, where they are not the usual ones.
        per_user: columns that hold one value a user and become scalars.
        read_rows: rows of a batch.
        header: names of the columns when the files have no header line.

    Raises:
        ValueError: when a file cannot be read, no user or item column is found, a user is null, or a per-user column varies within a user.
    """
    table = read_events(files, header)
    found = find_roles(table.column_names, roles, str(files[0]))
    if "time" in found:
        _check_time(table.column(found["time"]), found["time"], files)
    grouped = group_events(table, found["user"], per_user, str(files[0]))
    return table_rows(grouped, read_rows, {"files": [file_facts(f) for f in files], "roles": found}, f"{files[0]}, grouped by user", found)


def find_roles(names: Sequence[str], roles: Mapping[str, str], where: str) -> dict[str, str]:
    """Returns the columns that are `user`, `item` and, where there is one, `time`: as given, or by their usual names."""
    usual = {
        "user": [n for n in names if USERS.fullmatch(n)],
        "item": sorted((n for n in names if n.lower() in ITEMS), key=lambda n: ITEMS.index(n.lower())),
        "time": sorted((n for n in names if n.lower() in TIMES), key=lambda n: TIMES.index(n.lower())),
    }
    found = {role: roles.get(role) or next(iter(usual[role]), None) for role in usual}
    for role, name in found.items():
        if name not in names and (name is not None or role != "time"):
            got, todo = (
                f"columns {list(names)}",
                f"name it: --{role} COLUMN, or `events: {{{role}: COLUMN}}` in the schema; for a file without header give its names",
            )
            raise problem(f"No {role} column", got=got, wanted=name or f"a column such as {role}_id", where=where, todo=todo)
    return {role: name for role, name in found.items() if name is not None}


def _check_time(column: pa.ChunkedArray, name: str, files: Sequence[Path]) -> None:
    """Refuses a column of times in which a value is none: the first that is neither a number nor a date, as most others are."""
    if not pa.types.is_large_string(column.type) and not pa.types.is_string(column.type):
        return
    good = pc.fill_null(pc.match_substring_regex(column, _NUMBER), True)
    dates = pc.fill_null(pc.match_substring_regex(column, r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?Z?)?$"), True)
    good = dates if pc.sum(dates).as_py() > pc.sum(good).as_py() else good
    at = pc.index(good, False).as_py()
    if at >= 0:
        place = " and further files" if len(files) > 1 else f", line {at + 2}"
        wanted, todo = "seconds since 1970 in every line, or a date such as 2024-01-31 12:00:00 in every line", "mend or drop the line"
        where = f"{files[0]}{place}, column {name!r}, event {at}"
        raise problem("A time that is none", got=f"{column[at].as_py()!r:.80}", wanted=wanted, where=where, todo=todo)


_NUMBER = r"^-?\d+(\.\d*)?([eE][-+]?\d+)?$"


def read_events(files: Sequence[Path], header: Sequence[str] | None = None) -> pa.Table:
    """Returns all events of the files in order; a column that is not a number in every file is text in all of them.

    Numbers that begin with a 0, such as 007, are text too: they are names, and 7 is another one.
    """
    try:
        tables = [_read(file, header, as_text=False) for file in files]
        return _keep_zeros(pa.concat_tables(tables, promote_options="permissive").combine_chunks(), files, header)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        tables = [_read(file, header, as_text=True) for file in files]
    for table, file in zip(tables, files, strict=True):
        if table.column_names != tables[0].column_names:
            got = f"{table.column_names}, not {tables[0].column_names} as in {files[0]}"
            raise problem(
                "Columns differ between files", got=got, wanted="the same columns in the same order", where=file, todo="prepare them apart"
            )
    joined = pa.concat_tables(tables).combine_chunks()
    return pa.table({name: _narrow(joined.column(name)) for name in joined.column_names})


def group_events(table: pa.Table, user: str, per_user: Sequence[str], where: str) -> pa.Table:
    """Returns one row a user, ascending, with a large list of each other column; events keep their order."""
    codes, users = _user_codes(table.column(user), where, user)
    order = np.argsort(codes, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(codes, minlength=len(users)))])
    columns: dict[str, Any] = {user: users}
    for name in table.column_names:
        if name == user:
            continue
        values = table.column(name).take(pa.array(order)).combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        if name in per_user:
            _check_constant(values, offsets, users, name, where)
            columns[name] = values.take(pa.array(offsets[:-1]))
        else:
            columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    return pa.table(columns)


def _read(file: Path, header: Sequence[str] | None, *, as_text: bool) -> pa.Table:
    try:
        with pa.input_stream(str(file)) as stream:
            line = stream.read(1 << 16).split(b"\n")[0].decode("utf-8-sig").rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise problem("Not readable as CSV", got=str(error).split("\n")[0], wanted="UTF-8 text", where=file, todo=_CSV) from error
    delimiter = next((d for d in "\t;" if d in line), ",")
    names = list(header) if header else [name.strip('"') for name in line.split(delimiter)]
    kinds = dict.fromkeys(names, pa.large_string()) if as_text else {n: pa.float64() for n in names if n.endswith(":float")}
    try:
        table = pv.read_csv(
            str(file),
            read_options=pv.ReadOptions(column_names=list(header) if header else None, block_size=1 << 24),
            parse_options=pv.ParseOptions(delimiter=delimiter),
            convert_options=pv.ConvertOptions(column_types=kinds, null_values=_NULLS, strings_can_be_null=True),
        )
    except (pa.ArrowInvalid, OSError) as error:
        if not as_text and isinstance(error, pa.ArrowInvalid):
            raise
        raise problem(
            "Not readable as CSV", got=str(error).split("\n")[0], wanted="the same columns in every line", where=file, todo=_CSV
        ) from error
    # Names such as `item_id:token` are the atomic files of RecBole: the part behind the colon is a type.
    plain = [n.split(":")[0] for n in table.column_names]
    twice = sorted({name for name in plain if plain.count(name) > 1})
    if twice:
        where, todo = f"{file}, " + ("--header" if header else "line 1"), "give each column a name of its own"
        raise problem("Two columns of one name", got=twice, wanted="each once", where=where, todo=todo)
    binary = [name for name in table.column_names if pa.types.is_binary(table.schema.field(name).type)]
    if binary:
        where = f"{file}, column {binary[0]!r}"
        raise problem("Not readable as CSV", got="bytes that are no UTF-8", wanted="UTF-8 text", where=where, todo=_CSV)
    return table.rename_columns(plain)


_CSV = "mend the file, or give Parquet instead"


def _keep_zeros(table: pa.Table, files: Sequence[Path], header: Sequence[str] | None) -> pa.Table:
    """Returns the table with columns of integers as text where one of them is written with a 0 in front."""
    whole = [name for name in table.column_names if pa.types.is_integer(table.schema.field(name).type)]
    if whole and _may_have_zeros(files):
        written = pa.concat_tables([_read(file, header, as_text=True).select(whole) for file in files])
        for name in whole:
            column = written.column(name)
            if pc.any(pc.match_substring_regex(column, _ZERO_NUMBER)).as_py():
                table = table.set_column(table.column_names.index(name), name, column.combine_chunks())
    return table


def _may_have_zeros(files: Sequence[Path]) -> bool:
    """Returns whether a value may begin with a 0 that a number does not have, from the bytes: dates such as 01/02/2003 may, too."""
    for file in files:
        with pa.input_stream(str(file)) as stream:
            end = b"\n"
            while chunk := stream.read(1 << 22):
                if _ZERO.search(end + chunk):
                    return True
                end = chunk[-3:]
    return False


_ZERO = re.compile(rb"""[\n\r,;\t"]-?0\d""")
_ZERO_NUMBER = r"^-?0\d+$"


def _narrow(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pc.any(pc.match_substring_regex(column, _ZERO_NUMBER)).as_py():
        return column
    for kind in (pa.int64(), pa.float64(), pa.timestamp("s"), pa.timestamp("ns")):
        try:
            return column.cast(kind)
        except pa.ArrowInvalid:
            continue
    return column


def _user_codes(column: pa.ChunkedArray, where: str, name: str) -> tuple[Any, pa.Array]:
    if column.null_count:
        row = int(np.flatnonzero(pc.is_null(column).to_numpy())[0])
        raise problem(
            "An event without user",
            got="null",
            wanted="a user",
            where=f"{where}, column {name!r}, event {row}",
            todo="mend or drop these events",
        )
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))


def _check_constant(values: pa.Array, offsets: Any, users: pa.Array, name: str, where: str) -> None:
    codes = values.dictionary_encode(null_encoding="encode").indices.to_numpy(zero_copy_only=False)
    first = np.repeat(codes[offsets[:-1]], np.diff(offsets))
    bad = np.flatnonzero(codes != first)
    if len(bad):
        user = int(np.searchsorted(offsets, bad[0], side="right")) - 1
        got = f"{values[int(offsets[user])].as_py()!r} and {values[int(bad[0])].as_py()!r} for user {users[user].as_py()!r}"
        todo = "leave it out of context, label and weight; then it is a per-position feature"
        raise problem(
            "A per-sample column varies within a user", got=got, wanted="one value a user", where=f"{where}, column {name!r}", todo=todo
        )
