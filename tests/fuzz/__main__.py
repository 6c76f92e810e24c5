"""`python -m tests.fuzz --cases 1000 --seed 0`: bad input of every kind against the real command line; prints counts and every offender."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.fuzz.campaign import DRAWS, Tally, run_case, run_on_ranks
from tests.fuzz.case import Case, Ended
from tests.fuzz.ground import build_ground


def main() -> int:
    """Returns 1 when any case ended as it may not."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or scratch)
        with contextlib.redirect_stdout(io.StringIO()):
            ground = build_ground(folder / "ground")
        ready, tally = time.monotonic(), Tally()
        for number in range(args.first, args.first + args.cases):
            case, ended, outcome, why = run_case(number, args.seed, ground, folder, args.kind)
            tally.add(case.kind, outcome, why, ended.seconds)
            _tell(number, case, [ended], outcome, why, verbose=args.verbose)
        for number in range(args.first, args.first + args.ranks):
            case, outcome, why, all_ended = run_on_ranks(number, args.seed, ground, folder)
            tally.add("two ranks", outcome, why, max((ended.seconds for ended in all_ended), default=0.0))
            _tell(number, case, all_ended, outcome, why, verbose=args.verbose)
    print("\n".join(tally.lines()))
    seconds, before = time.monotonic() - ready, ready - started
    print(f"{tally.offenders} offenders; slowest case {tally.slowest:.1f} s; {seconds:.0f} s, and {before:.0f} s to get ready")
    return 1 if tally.offenders else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(DRAWS), default="", help="cases of one kind only")
    parser.add_argument("--keep", help="folder for the rooms of offenders")
    parser.add_argument("--ranks", type=int, default=0, help="then as many cases of configs, stores and runs on two real ranks")
    parser.add_argument("--verbose", action="store_true", help="print each case, and what offenders printed")
    return parser


def _tell(number: int, case: Case, ended: Sequence[Ended], outcome: str, why: str, *, verbose: bool) -> None:
    if not (verbose or why):
        return
    kind, seconds = "ranks" if len(ended) > 1 else case.kind, max((each.seconds for each in ended), default=0.0)
    print(f"{number:5} {kind:7} {outcome:9} {seconds:5.1f} s  {case.told!r}", flush=True)
    if why:
        print(f"      {why}\n      distrag {json.dumps(case.words)}", flush=True)
    if why and verbose:
        print("\n".join(f"      | {line}" for each in ended for line in (each.err + each.out)[-3000:].splitlines()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
