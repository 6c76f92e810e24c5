"""`python -m tests.fuzz --cases 1000 --seed 0`: bad input of every kind against the real command line; prints counts and every offender."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.fuzz.campaign import DRAWS, Finding, Tally, run_campaign, run_on_ranks
from tests.fuzz.case import Ended
from tests.fuzz.ground import build_ground


def main() -> int:
    """Returns 1 when any case ended as it may not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(DRAWS), default="", help="cases of one kind only")
    parser.add_argument("--keep", help="folder for the rooms of offenders")
    parser.add_argument("--ranks", type=int, default=0, help="so many cases of configs, stores and runs on two real ranks as well")
    parser.add_argument("--verbose", action="store_true", help="print each case, and what offenders printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or scratch)
        ground = _quietly(folder)
        ready = time.monotonic()
        for number, case, ended, outcome, why in run_campaign(
            range(args.first, args.first + args.cases), args.seed, ground, folder, args.kind
        ):
            tally.counts[case.kind, outcome] += 1
            tally.slowest = max(tally.slowest, ended.seconds)
            if args.verbose or why:
                print(f"{number:5} {case.kind:7} {outcome:9} {ended.seconds:5.1f} s  {case.told!r}", flush=True)
            if why:
                tally.findings.append(Finding(number, case, outcome, why, ended))
                print(f"      {why}\n      distrag {json.dumps(case.words)}", flush=True)
                if args.verbose:
                    print("\n".join(f"      | {line}" for line in (ended.err + ended.out)[-3000:].splitlines()), flush=True)
        for number in range(args.first, args.first + args.ranks):
            case, outcome, why, all_ended = run_on_ranks(number, args.seed, ground, folder)
            tally.counts["two ranks", outcome] += 1
            if args.verbose or why:
                print(f"{number:5} {'ranks':7} {outcome:9} {max([0.0, *(e.seconds for e in all_ended)]):5.1f} s  {case.told!r}", flush=True)
            if why:
                tally.findings.append(Finding(number, case, outcome, why, all_ended[0] if all_ended else Ended(None, "", why, 0.0)))
                print(f"      {why}\n      distrag {json.dumps(case.words)}", flush=True)
                if args.verbose:
                    print("\n".join(f"      | {line}" for e in all_ended for line in e.err[-2000:].splitlines()), flush=True)
    print("\n".join(tally.lines()))
    print(
        f"{len(tally.findings)} offenders; slowest case {tally.slowest:.1f} s; {time.monotonic() - ready:.0f} s, {ready - started:.0f} s to get ready"
    )
    return 1 if tally.findings else 0


def _quietly(folder: Path):  # type: ignore[no-untyped-def]
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        return build_ground(folder / "ground")


if __name__ == "__main__":
    sys.exit(main())
