"""Bad input of every kind ends in a message that can be acted on, or in the right result; `python -m tests.fuzz` runs a thousand cases."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import child
from tests.fuzz.campaign import DRAWS, run_case, run_on_ranks
from tests.fuzz.case import Case, Ended, Ground, Room
from tests.fuzz.ground import build_ground
from tests.fuzz.verdict import judge

CASES = {"config": 36, "store": 28, "source": 24, "words": 20, "run": 12}
FIVE = "distrag train: No\n  got:    a\n  wanted: b\n  where:  c.yaml\n  to do:  mend it\n"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    with contextlib.redirect_stdout(io.StringIO()):
        return build_ground(tmp_path_factory.mktemp("fuzz") / "ground")


@pytest.mark.parametrize("kind", DRAWS)
def test_bad_input_ends_in_words_or_in_the_right_result(kind: str, ground: Ground, tmp_path: Path) -> None:
    ends = [(number, *run_case(number, 7, ground, tmp_path, kind)) for number in range(CASES[kind])]
    assert [f"{number}: {case.told}: {why}\n{ended.err}" for number, case, ended, _, why in ends if why] == []
    assert {outcome for *_, outcome, _ in ends} & {"refused", "usage"}


def test_two_ranks_end_in_the_same_words(ground: Ground, tmp_path: Path) -> None:
    ends = [(number, *run_on_ranks(number, 7, ground, tmp_path)) for number in range(6)]
    assert [f"{number}: {case.told}: {why}\n{ended}" for number, case, _, why, ended in ends if why] == []


@pytest.mark.parametrize(
    ("ended", "expect", "outcome"),
    [
        (Ended(2, "", FIVE, 0.1), "refused", "refused"),
        (Ended(2, "", FIVE, 0.1), "fine", "refused"),
        (Ended(0, "", "", 0.1), "refused", "silent"),
        (Ended(0, "", "", 0.1), "fine", "fine"),
        (Ended(2, "", FIVE.replace("c.yaml", "d.yaml"), 0.1), "refused", "vague"),
        (Ended(2, "", FIVE.replace("  to do:  mend it\n", ""), 0.1), "refused", "vague"),
        (Ended(2, "", FIVE.replace("a\n", "'NoneType' object has no attribute 'x'\n"), 0.1), "refused", "vague"),
        (Ended(2, "", "distrag train: invalid literal for int()\n", 0.1), "refused", "vague"),
        (Ended(1, "", "Traceback (most recent call last):\nKeyError: 3\n", 0.1), "refused", "traceback"),
        (Ended(None, "", "", 60.0), "refused", "hang"),
        (Ended(-11, "", "", 0.1), "refused", "died"),
        (Ended(2, "", f"x.py:3: UserWarning: odd\n{FIVE}", 0.1), "refused", "leak"),
        (Ended(2, "", FIVE, 0.1, ("/etc/x",)), "refused", "outside"),
        (
            Ended(2, "", "usage: distrag plan [-h] config\ndistrag plan: error: argument --epoch: invalid int value: 'x'\n", 0.1),
            "any",
            "usage",
        ),
    ],
)
def test_the_verdict_tells_good_ends_from_bad_ones(ended: Ended, expect: str, outcome: str) -> None:
    names = ("c.yaml",) if outcome not in ("usage",) else ()
    found, why = judge(Case("config", "", [], expect, names), ended)  # type: ignore[arg-type]
    assert found == outcome
    assert bool(why) == (outcome not in ("refused", "fine", "usage") or (expect == "fine" and outcome == "refused"))


def test_a_result_is_looked_at_and_a_second_command_has_to_refuse() -> None:
    good = Ended(0, "", "", 0.1)
    assert judge(Case("store", "", [], right=lambda _: "another value was used"), good)[1] == "another value was used"
    assert judge(Case("store", "", [], then=["stats"]), good, Ended(0, "", "", 0.1))[1]
    assert not judge(Case("store", "", [], then=["stats"]), good, Ended(2, "", FIVE, 0.1))[1]


def _writes_elsewhere(words: list[str]) -> int:
    (Path(words[0]) / "outside").write_text("x")
    os.chdir(words[0])
    os.rename("outside", "moved")
    return 0


def _sleeps(_words: list[str]) -> int:
    time.sleep(60)
    return 0


def _warns(_words: list[str]) -> int:
    warnings.warn("odd", stacklevel=1)
    print("told", file=sys.stderr)
    return 0


def test_a_child_is_watched_as_it_writes_waits_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(what: Callable[[list[str]], int], limit_s: float = 30.0) -> Ended:
        monkeypatch.setattr(child, "call", what)
        return child.run_words([str(tmp_path)], Room.make(tmp_path / what.__name__), limit_s)

    assert set(run(_writes_elsewhere).wrote) == {str(tmp_path / "outside"), str(tmp_path / "moved")}
    assert run(_sleeps, limit_s=0.5).code is None
    assert "UserWarning: odd" in run(_warns).err
