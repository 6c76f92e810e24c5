"""Words of a bench are checked before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from distrag.bench.arguments import count, real, report_file, seed


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (
            count,
            {"1": 1, "1e6": 10**6, "2147483647": 2**31 - 1},
            ["0", "-1", "1.5", "nan", "inf", "1e400", "", "x", "2147483648", "9" * 5000],
        ),
        (seed, {"0": 0, "7": 7}, ["-1", "1.5", "", "x", "٣", "9" * 20]),
        (real(0.0, 1.0), {"0": 0.0, "0.5": 0.5}, ["-0.1", "1", "nan", "inf", "", "x"]),
        (real(0.0), {"0": 0.0, "1e9": 1e9}, ["-1", "nan", "inf"]),
    ],
)
def test_numbers_have_a_range(read: Callable[[str], float], good: dict[str, float], bad: list[str]) -> None:
    assert {word: read(word) for word in good} == good
    for word in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="wanted"):
            read(word)


def test_a_report_goes_to_a_file_that_can_be_written(tmp_path: Path) -> None:
    assert report_file(str(tmp_path / "x.json")) == str(tmp_path / "x.json")
    for word in ("", str(tmp_path), str(tmp_path / "no" / "x.json"), "/dev/null/x.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="wanted a file"):
            report_file(word)
