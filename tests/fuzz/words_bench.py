"""Command lines of `bench`, small enough to end at once where they are good."""

from __future__ import annotations

import random

from tests.fuzz.case import Case, Ground, Room
from tests.fuzz.values import each

SMALL = each("--rounds=1 --seconds=0.01 --samples=64 --encoders mean --batch-sizes 8 --num-items=50 --dim=8 --max-len=10 --num-layers=1")
OPTIONS = each("rounds seconds samples num-items dim max-len num-layers num-heads dropout threads batch-sizes")
LARGE = ("1e9", str(10**12), "9" * 60)
"""Numbers that are sound for some options, and would measure for long or fill the machine."""


def draw_bench(r: random.Random, ground: Ground, number: str, odd: str, room: Room) -> Case:
    """Returns a case of a bench.

    Args:
        r: draws.
        ground: good input.
        number: any number.
        odd: any path.
        room: of the case.
    """
    few, store = each("--samples-a-rank 4 --max-steps 2"), str(ground.store)
    json = r.choice(["/nowhere/x.json", str(room.here), "", str(room.out / "x.json")])
    words = r.choice(
        [
            *([*SMALL, f"--{r.choice(OPTIONS)}={'-5' if number in LARGE else number}"], [*SMALL, "--json", json], [*SMALL, "--data", odd]),
            *(["--encoders", "x"], ["plan-balance", "--store", odd, "--world-sizes", "2", *few, "--lengths"], ["plan-sped"], ["ranks"]),
            ["plan-balance", "--store", store, "--world-sizes", "-5" if number in LARGE else number, *few],
            ["plan-speed", "--samples", r.choice(["0", "x", "-1", "nan", "1.5", ""]), "--lengths", "zipf"],
            ["ranks", "--store", r.choice([store, "nowhere"])],
        ]
    )
    return Case("words", f"bench {' '.join(words)[-90:]}", ["bench", *words])
