"""Draws cases, runs them in forks, and counts how they ended."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.case import Case, Ended, Ground, Room
from tests.fuzz.child import run_words
from tests.fuzz.configs import draw_config
from tests.fuzz.ranks import judge_ranks
from tests.fuzz.runs import draw_run
from tests.fuzz.sources import draw_source
from tests.fuzz.stores import draw_store
from tests.fuzz.verdict import judge
from tests.fuzz.words import draw_words

LIMIT_S = 60.0
DRAWS: dict[str, tuple[Callable[[random.Random, Ground, Room], Case], int]] = {
    "config": (draw_config, 32),
    "store": (draw_store, 22),
    "source": (draw_source, 18),
    "words": (draw_words, 18),
    "run": (draw_run, 10),
}
"""How cases of each kind are drawn, and how many of a hundred there are."""


@dataclass
class Tally:
    """What a campaign came to."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    offenders: int = 0
    slowest: float = 0.0

    def add(self, kind: str, outcome: str, why: str, seconds: float) -> None:
        """Counts a case."""
        self.counts[kind, outcome] += 1
        self.offenders += bool(why)
        self.slowest = max(self.slowest, seconds)

    def lines(self) -> list[str]:
        """Returns a table of kinds and outcomes."""
        outcomes = sorted({outcome for _, outcome in self.counts})
        rows = [["kind", *outcomes, "all"]]
        for kind in [*DRAWS, "two ranks"]:
            its = [self.counts[kind, outcome] for outcome in outcomes]
            rows.append([kind, *map(str, its), str(sum(its))])
        rows.append(
            [
                "all",
                *(str(sum(self.counts[kind, outcome] for kind in [*DRAWS, "two ranks"])) for outcome in outcomes),
                str(sum(self.counts.values())),
            ]
        )
        return ["  ".join(f"{word:>10}" for word in row) for row in rows]


def kind_of(number: int) -> str:
    """Returns the kind of a case: the same mix in every hundred."""
    kinds = [kind for kind, (_, share) in DRAWS.items() for _ in range(share)]
    random.Random(0).shuffle(kinds)
    return kinds[number % len(kinds)]


def draw_case(number: int, seed: int, ground: Ground, room: Room, kind: str = "") -> Case:
    """Returns the case of this number."""
    return DRAWS[kind or kind_of(number)][0](random.Random(f"{seed}/{number}"), ground, room)


def run_case(
    number: int, seed: int, ground: Ground, folder: Path, kind: str = "", limit_s: float = LIMIT_S
) -> tuple[Case, Ended, str, str]:
    """Returns a case, how it ended, the outcome, and what is wrong with that; its folder is removed when nothing is."""
    room = Room.make(folder / str(number))
    case = draw_case(number, seed, ground, room, kind)
    before = [_print_of(room.given), _print_of(room.here)]
    ended = run_words(case.words, room, limit_s)
    again = run_words(case.then, room, limit_s) if case.then and ended.code == 0 else None
    outcome, why = judge(case, ended, again)
    if not why and [_print_of(room.given), _print_of(room.here)] != before:
        outcome, why = "outside", "changed what it was given, or the folder it was called from"
    if not why:
        shutil.rmtree(room.out.parent)
    return case, again if why and again is not None else ended, outcome, why


ON_RANKS = ("config", "store", "run", "config")
"""Kinds that are drawn for two ranks, in turn: the other commands are of one process."""


def run_on_ranks(number: int, seed: int, ground: Ground, folder: Path) -> tuple[Case, str, str, list[Ended]]:
    """Returns a case, its outcome on two ranks, what is wrong with that, and how each rank ended."""
    room = Room.make(folder / f"ranks-{number}")
    draw = DRAWS[ON_RANKS[number % len(ON_RANKS)]][0]
    cases = (draw(random.Random(f"ranks/{seed}/{number}/{again}"), ground, _emptied(room)) for again in range(100))
    case = next(case for case in cases if case.words[0] in ("train", "evaluate"))
    outcome, why, ended = judge_ranks(case, room)
    if not why:
        shutil.rmtree(room.out.parent)
    return case, outcome, why, ended


def _emptied(room: Room) -> Room:
    shutil.rmtree(room.out.parent)
    return Room.make(room.out.parent)


def _print_of(folder: Path) -> str:
    """Returns a fingerprint of everything below a folder."""
    digest = hashlib.blake2b()
    for base, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*files, *folders]):
            path = Path(base) / name
            digest.update(f"{path}|{path.lstat().st_mode}|".encode(errors="surrogateescape"))
            if path.is_file() and not path.is_symlink():
                digest.update(path.read_bytes())
    return digest.hexdigest()
