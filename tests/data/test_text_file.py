"""Small files are read as plain values, or refused in words: whatever stands in them, and whatever they are."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from distrag.data.text_file import dump_yaml, parse_json, parse_yaml, read_small

ABOUT = {"what": "The file", "todo": "mend it"}


def read(text: bytes | str) -> Any:
    return parse_yaml(text, "here", **ABOUT)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("010", "010"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("0x1F", 31),
        ("null", None),
        ("", None),
        ("é: [1, true, 'x']", {"é": [1, True, "x"]}),
        ("a: &a {b: 1}\nc: {<<: *a, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("a: &x 3\nb: *x", {"a": 3, "b": 3}),
        ("!!str 3", "3"),
    ],
)
def test_yaml_is_plain_values_and_numbers_are_what_they_look_like(text: str, value: object) -> None:
    assert read(text) == value
    assert read(b"\xef\xbb\xbf" + text.encode()) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' twice"),
        ("x: {a: 1, a: 1}", "the key 'a' twice"),
        ("a: &a [*a]", "a holds itself"),
        ("[" * 100 + "]" * 100, "more than 64 levels"),
        ("[" * 50_000, "level"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 90)), "more than 64 levels"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)), "2,000,000 values"),
        ("!!python/object/apply:os.system [echo]", "line 1: the tag"),
        ("!!timestamp 3", "the tag"),
        ("? [1, 2]\n: 3", "a key that is no text"),
        ("1: 2", "the key 1, which is no text"),
        ("a: *nowhere", "line 1: *nowhere names nothing"),
        ("a: " + "9" * 5000, "a number of 5,000 digits"),
        ("a: 1\n---\na: 1", "single document"),
        ("a: [", "line"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_yaml_that_is_no_plain_tree_is_refused_with_its_line(text: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match="The file cannot be read") as caught:
        read(text)
    assert told in str(caught.value)
    assert all(part in str(caught.value) for part in ("got:", "wanted:", "where:  here", "to do:  mend it"))


@pytest.mark.parametrize(
    "value", ["1e3", "010", "0", "1", "true", "null", ".nan", "1e-5", "a: b", "é", "- x", "12e45", "2020-01-01", " x ", "a\nb"]
)
def test_what_is_dumped_reads_back_as_it_was(value: str) -> None:
    tree = {"text": value, value: [value, 1e-8, 1, None, True]}
    assert read(dump_yaml(tree)) == tree


def test_json_that_is_deep_or_none_is_refused() -> None:
    for text in (b"[" * 100_000, b"{", b"\xff"):
        with pytest.raises(ValueError, match="The file cannot be read"):
            parse_json(text, "here", **ABOUT)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    told = {
        "pipe": "a pipe",
        "zeros": "a device",
        "loop": "symbolic links",
        "": "a folder",
        "nowhere": "No such file",
        "a\0": "null",
        "y" * 300: "too long",
    }
    for name, got in told.items():
        with pytest.raises(ValueError, match="The file cannot be read") as caught:
            read_small(tmp_path / name, **ABOUT)
        assert got in str(caught.value)
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="more than"):
        read_small(tmp_path / "large", **ABOUT, most_bytes=10)


def test_a_pipe_that_someone_writes_to_is_read_whole(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    content = b"x" * 300_000

    def write() -> None:
        with os.fdopen(write_end, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_small(f"/dev/fd/{read_end}", **ABOUT) == content
    writer.join()
    with pytest.raises(ValueError, match="a pipe that nobody writes to"):
        read_small(f"/dev/fd/{read_end}", **ABOUT)
    os.close(read_end)
