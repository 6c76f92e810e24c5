"""A case on two real ranks: both have to end, and in the same message."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from tests.fuzz.case import Case, Ended, Room
from tests.fuzz.child import as_a_user_has_it, call
from tests.fuzz.verdict import judge
from tests.ranks import RankError, run_ranks

LIMIT_S = 60.0


def judge_ranks(case: Case, room: Room, world_size: int = 2) -> tuple[str, str, list[Ended]]:
    """Returns the outcome on all ranks, what is wrong with it, and how each of them ended."""
    started = time.monotonic()
    try:
        codes = run_ranks(_on_rank, world_size, case.words, room, timeout_s=LIMIT_S)
    except RankError as error:
        return "hang" if "had not ended" in str(error) else "died", str(error), []
    seconds = time.monotonic() - started
    ended = [Ended(code, *(_read(room, rank, name) for name in ("stdout", "stderr")), seconds) for rank, code in enumerate(codes)]
    outcome, why = judge(case, ended[0])
    for rank, other in enumerate(ended[1:], 1):
        if why:
            break
        outcome, why = judge(case, other)
        if not why and (other.code, _message(other)) != (ended[0].code, _message(ended[0])):
            outcome, why = "apart", f"rank {rank} ended in another message than rank 0"
    return outcome, why, ended


def _message(ended: Ended) -> str:
    """Returns what a rank was told: the fault, not which of several bad values or devices it met itself."""
    found = re.search(r"^distrag \w+: .*", ended.err, re.MULTILINE)
    return re.sub(r"rank \d+: ", "", found.group()) if found else ""


def _on_rank(words: list[str], room: Room) -> int:
    for name, number in (("stdout", 1), ("stderr", 2)):
        with _file(room, int(os.environ["RANK"]), name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    as_a_user_has_it(room)
    return call(words)


def _file(room: Room, rank: int, name: str) -> Path:
    return room.out.parent / f"{name}-{rank}"


def _read(room: Room, rank: int, name: str) -> str:
    return _file(room, rank, name).read_text(encoding="utf-8", errors="replace")
