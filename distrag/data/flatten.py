"""Arrow columns of any make as lengths and plain NumPy values: slices, chunks, dictionaries and nulls end here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shape = Literal["list", "scalar", "null"]
Element = Literal["int", "float", "text", "time", "null", "other"]
Unit = Literal["s", "ms", "us", "ns"]
PER_SECOND: dict[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ColumnType:
    """What a column holds, as far as `prepare` cares.

    Attributes:
        shape: a list a row, one value a row, or nothing but nulls.
        element: class of the values; `null` when no file has one, `other` for what no feature can hold.
        arrow: Arrow's own name of the type, for messages.
    """

    shape: Shape
    element: Element
    arrow: str


def column_type(kind: pa.DataType) -> ColumnType:
    """Returns the class of an Arrow type; lists of lists and structs are `other`."""
    plain = _plain_type(kind)
    if pa.types.is_null(plain):
        return ColumnType("null", "null", str(kind))
    if _is_list(plain):
        return ColumnType("list", _element(_plain_type(plain.value_type)), str(kind))
    return ColumnType("scalar", _element(plain), str(kind))


def unify(a: ColumnType, b: ColumnType) -> ColumnType | None:
    """Returns the type that holds both, or None: integers widen, nulls give way, integers join floats."""
    shapes = {a.shape, b.shape} - {"null"}
    elements = {a.element, b.element} - {"null"}
    if len(shapes) > 1 or (len(elements) > 1 and elements != {"int", "float"}):
        return None
    keep = a if b.element == "null" or (a.element, b.element) == ("float", "int") else b
    shape = keep.shape if keep.shape != "null" else (a.shape if a.shape != "null" else b.shape)
    return ColumnType(shape, keep.element, keep.arrow)


def flatten(column: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.int64], pa.Array, int]:
    """Returns lengths int64 `[N]`, the flat values, and how many rows were null; a null row is empty.

    A slice of a list array keeps the whole child array and absolute offsets, so both are read through kernels that respect the slice.
    """
    if isinstance(column, pa.ChunkedArray):
        parts = [flatten(chunk) for chunk in column.chunks]
        if not parts:
            return flatten(pa.array([], column.type))
        values = pa.chunked_array([p[1] for p in parts]).combine_chunks()
        return np.concatenate([p[0] for p in parts]), values, sum(p[2] for p in parts)
    array = decode(column)
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), pa.nulls(0), len(array)
    lengths = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    return lengths, decode(pc.list_flatten(array)), array.null_count


def decode(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns one array without dictionaries, run lengths, chunks or extension types."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # what does not fit one array of 32-bit offsets stays in chunks
            array = pa.concat_arrays([_widen(chunk) for chunk in array.chunks]) if array.num_chunks else pa.array([], array.type)
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary.take(array.indices)
        elif pa.types.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        else:
            return array


def integers(values: pa.Array, where: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns int64 values and where they were null (0 there); floats count when they are whole, NaN is null.

    Raises:
        ValueError: when a value does not fit int64 or is no whole number.
    """
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.int64), np.ones(len(values), np.bool_)
    if not (_number_like(values.type) or pa.types.is_boolean(values.type)):
        raise problem(
            "Not whole numbers", got=values.type, wanted="integers", where=where, todo="give the feature another kind in the schema"
        )
    null = pc.is_null(values, nan_is_null=True)
    try:
        known = pc.if_else(null, pa.scalar(None, values.type), values) if pa.types.is_floating(values.type) else values
        whole = pc.fill_null(pc.cast(known, pa.int64()), 0)
    except pa.ArrowInvalid as error:
        todo = "store ids as integers or text, or give the feature kind: number"
        raise problem("Not whole numbers of 64 bits", got=str(error).split("\n")[0], wanted="int64", where=where, todo=todo) from error
    return whole.to_numpy(zero_copy_only=False), null.to_numpy(zero_copy_only=False)


def numbers(values: pa.Array, where: str) -> NDArray[np.float64]:
    """Returns float64 values; NaN stands for null, NaN, infinity and what float32 cannot hold."""
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan)
    if not (_number_like(values.type) or pa.types.is_boolean(values.type)):
        raise problem("Not numbers", got=values.type, wanted="numbers", where=where, todo="give the feature another kind in the schema")
    small = values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values
    plain = pc.fill_null(pc.cast(small, pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    return np.where(np.abs(plain) <= _F32_MAX, plain, np.nan)


def seconds(values: pa.Array, unit: Unit, where: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns int64 seconds and where the time was null (0 there); fractions are cut off downwards, in integers.

    Args:
        values: timestamps or dates, or numbers in `unit`.
        unit: unit of plain numbers; timestamps carry their own.
        where: for the error.
    """
    raw, null, per_second = ticks(values, unit, where)
    return np.floor_divide(raw, per_second).astype(np.int64), null


def ticks(values: pa.Array, unit: Unit, where: str) -> tuple[NDArray[Any], NDArray[np.bool_], int]:
    """Returns times as fine as they are written, int64 or float64, where they were null (0 there), and how many make a second.

    Args:
        values: as for `seconds`.
        unit: as for `seconds`.
        where: for the error.
    """
    kind = values.type
    stamped = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    if pa.types.is_date(kind):
        values, kind = values.cast(pa.timestamp("ms")), pa.timestamp("ms")
    if pa.types.is_timestamp(kind):
        unit = kind.unit
        values = values.cast(pa.int64())
    if pa.types.is_floating(values.type):
        plain = pc.fill_null(pc.cast(values, pa.float64()), np.nan).to_numpy(zero_copy_only=False)
        null = ~np.isfinite(plain)
        plain = np.where(null, 0.0, plain)
        _check_unit(plain, unit, where)
        return plain, null, PER_SECOND[unit]
    whole, null = integers(values, where)
    if not stamped:
        _check_unit(whole, unit, where)
    return whole, null, PER_SECOND[unit]


_MOST_SECONDS = 10**11
"""The year 5138. Times now are far below it in seconds, and above it in every finer unit."""


def _check_unit(times: NDArray[Any], unit: Unit, where: str) -> None:
    """Refuses numbers that cannot be times in `unit`: of milliseconds taken for seconds all gaps would be a thousand times too long."""
    most = float(_MOST_SECONDS * PER_SECOND[unit])  # of nanoseconds more than int64 holds
    bad = np.flatnonzero((times > most) | (times < -most))
    if not len(bad):
        return
    value = times[bad[0]]
    fitting = next((name for name, per in PER_SECOND.items() if abs(int(value)) < _MOST_SECONDS * per), None)
    todo = (
        f"say the unit in the schema: `{{kind: time, unit: {fitting}}}`" if fitting else "mend the value, or give the feature another kind"
    )
    wanted = f"times of unit {unit}, at most {_MOST_SECONDS * PER_SECOND[unit]:,}: the year 5138"
    raise problem("A number that is no time in its unit", got=value, wanted=wanted, where=where, todo=todo)


def texts(values: pa.Array) -> pa.Array:
    """Returns large_string values in Unicode normal form C: composed and decomposed spellings are one value; numbers become decimals."""
    return pc.utf8_normalize(pc.cast(values, pa.large_string()), form="NFC")


def _is_list(kind: pa.DataType) -> bool:
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view, pa.types.is_large_list_view)
    return any(check(kind) for check in checks)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def _number_like(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _element(kind: pa.DataType) -> Element:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    return "null" if pa.types.is_null(kind) else "other"


def _widen(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type):
        return array.cast(pa.large_string())
    return array.cast(pa.large_list(array.type.value_type)) if pa.types.is_list(array.type) else array
