"""Arrow lists of every make give the same lengths and values, and times stay whole numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrag.data.collect import Times, time_order
from distrag.data.flatten import column_type, flatten, integers, numbers, seconds, texts, unify
from distrag.data.recipe import FeatureRecipe

ROWS = [[1], [2, 3], [4, 5, 6]]


def parts(column: pa.Array | pa.ChunkedArray) -> tuple[list[int], list[object], int]:
    lengths, values, nulls = flatten(column)
    return lengths.tolist(), values.to_pylist(), nulls


def test_a_sliced_list_array_gives_only_its_own_values() -> None:
    array = pa.array(ROWS)
    assert parts(array.slice(1)) == ([2, 3], [2, 3, 4, 5, 6], 0)
    assert parts(pa.chunked_array([array, array.slice(1)])) == ([1, 2, 3, 2, 3], [1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6], 0)


LISTS = {
    "list": pa.list_(pa.int64()),
    "large_list": pa.large_list(pa.int32()),
    "list_view": pa.list_view(pa.int64()),
    "large_list_view": pa.large_list_view(pa.int64()),
    "dictionary values": pa.list_(pa.dictionary(pa.int8(), pa.int64())),
}


@pytest.mark.parametrize("kind", LISTS.values(), ids=LISTS)
def test_every_list_type_gives_the_same_positions(kind: pa.DataType) -> None:
    array = pa.array([[9], [1, 2], None, [], [3, None]], kind)
    assert parts(array.slice(1)) == ([2, 0, 0, 2], [1, 2, 3, None], 1)
    assert column_type(kind).shape == "list"
    assert column_type(kind).element == "int"


def test_fixed_size_lists_skip_the_values_behind_a_null() -> None:
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert parts(array) == ([2, 0, 2], [1, 2, 3, 4], 1)
    assert parts(array.slice(1)) == ([0, 2], [3, 4], 1)


def test_dictionary_encoded_lists_are_looked_up() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array([[1, 2], [3]]))
    assert parts(array) == ([2, 1, 0, 2], [1, 2, 3, 1, 2], 1)


def test_columns_of_nulls_are_empty_histories() -> None:
    assert parts(pa.nulls(2)) == ([0, 0], [], 2)
    assert parts(pa.array([[], []], pa.list_(pa.null()))) == ([0, 0], [], 0)
    assert parts(pa.chunked_array([], pa.list_(pa.int64()))) == ([], [], 0)


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=4), max_size=12), st.data())
def test_any_slice_of_any_chunks_flattens_like_plain_lists(rows: list[list[int | None] | None], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    start = data.draw(st.integers(0, len(rows)))
    column = pa.chunked_array([pa.array(rows[:cut], pa.list_(pa.int64())), pa.array(rows[cut:], pa.list_(pa.int64()))]).slice(start)
    chosen = rows[start:]
    wanted = [len(r or []) for r in chosen], [v for r in chosen for v in r or []], sum(r is None for r in chosen)
    assert parts(column) == wanted


def test_gaps_between_times_are_taken_in_whole_numbers() -> None:
    times, _ = seconds(pa.array([1700000000, 1700000001, 1700000065]), "s", "here")
    assert np.diff(times).tolist() == [1, 64]
    assert times.dtype == np.int64


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (pa.array([1700000000123, None, -1], pa.int64()), "ms"),
        (pa.array([1700000000123, None, -1], pa.timestamp("ms")), "s"),
        (pa.array([1700000000.9, float("nan"), -0.1]), "s"),
        (pa.array([1700000000123456789, None, -1], pa.timestamp("ns", "UTC")), "s"),
    ],
)
def test_times_of_every_unit_become_seconds_rounded_down(values: pa.Array, unit: str) -> None:
    times, null = seconds(values, unit, "here")  # type: ignore[arg-type]
    assert times[~null].tolist() == [1700000000, -1]
    assert null.tolist() == [False, True, False]


def test_dates_are_seconds_since_1970() -> None:
    assert seconds(pa.array([1], pa.date32()), "s", "here")[0].tolist() == [86400]


def test_an_unknown_time_takes_the_one_before_it_in_its_row() -> None:
    collector = Times(FeatureRecipe("time"), "history:time")
    filled = collector.read(pa.array([None, 5, None, None, None, 7, None]), np.array([4, 1, 2]), "here")
    assert filled.tolist() == [5, 5, 5, 5, 0, 7, 7]
    assert collector.num_null == 5


def test_equal_times_keep_the_order_of_the_file() -> None:
    order = time_order(np.array([3, 1, 3, 1, 9, 9, 8]), np.array([4, 3]))
    assert order is not None
    assert order.tolist() == [1, 3, 0, 2, 6, 4, 5]
    assert time_order(np.array([1, 1, 2, 0, 0]), np.array([3, 2])) is None


def test_whole_numbers_come_from_floats_and_bools_but_never_by_rounding() -> None:
    assert integers(pa.array([1.0, None, float("nan")]), "here")[0].tolist() == [1, 0, 0]
    assert integers(pa.array([True, None]), "here")[1].tolist() == [False, True]
    for bad in (pa.array([1.5]), pa.array([2**63], pa.uint64()), pa.array(["1"])):
        with pytest.raises(ValueError, match=r"whole numbers(.|\n)*where:  here"):
            integers(bad, "here")


def test_numbers_that_float32_cannot_hold_count_as_null() -> None:
    found = numbers(pa.array([1.5, None, float("inf"), float("nan"), 1e300]), "here")
    assert np.isnan(found).tolist() == [False, True, True, True, True]


def test_composed_and_decomposed_text_are_one_value() -> None:
    assert texts(pa.array(["item_e\u0301"])).to_pylist() == texts(pa.array(["item_\u00e9"])).to_pylist()


def test_types_widen_or_are_told_apart() -> None:
    small, big, nulls = column_type(pa.list_(pa.int32())), column_type(pa.list_(pa.int64())), column_type(pa.list_(pa.null()))
    assert unify(small, big) is not None
    assert unify(nulls, big) == big
    assert unify(big, nulls) == big
    assert unify(column_type(pa.null()), big) == big
    floats = unify(big, column_type(pa.list_(pa.float32())))
    assert floats is not None
    assert floats.element == "float"
    assert unify(big, column_type(pa.list_(pa.string()))) is None
    assert unify(big, column_type(pa.int64())) is None
    assert column_type(pa.list_(pa.list_(pa.int64()))).element == "other"
