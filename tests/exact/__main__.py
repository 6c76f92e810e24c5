"""`python -m tests.exact`: runs the whole matrix and prints how far N ranks are from the plain reference, for each combination."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.exact.cases import EPS, FURTHER, STEPS, Case, build_store, matrix
from tests.exact.harness import LIMIT, compare, refusals, run_cases, run_references

_AT_ONCE = 12  # cases of one fork


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exact", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="ways to run a step")
    parser.add_argument("--eps", nargs="+", choices=EPS, default=list(EPS), help="eps of the adaptive optimizers")
    parser.add_argument("-k", default="", metavar="WORDS", help="only cases whose name holds all these words")
    parser.add_argument("--json", metavar="FILE", help="write every number there")
    args = parser.parse_args()
    started = time.perf_counter()
    # At the usual eps rounding is blown up, whatever the step; it is looked at once.
    pairs = [(step, eps) for step in args.steps for eps in args.eps if eps == "large" or step == "plain"]
    cases = [case for step, eps in pairs for case in matrix(step, eps)] + FURTHER
    cases = [case for case in cases if all(word in str(case).split() for word in args.k.split())]
    with tempfile.TemporaryDirectory() as folder:
        store = build_store(Path(folder) / "store")
        refused = {case: text for case in cases if (text := _refused(case, store, args.worlds))}
        rows = []
        left = [case for case in cases if case not in refused]
        for at in range(0, len(left), _AT_ONCE):
            rows += _run(left[at : at + _AT_ONCE], args.worlds, store, Path(folder) / f"part-{at}")
    _summary(rows, refused, time.perf_counter() - started)
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "refused": {str(c): t for c, t in refused.items()}}, indent=1) + "\n")
    sys.exit(0 if all(row["close"] for row in rows) else 1)


def _refused(case: Case, store: Path, worlds: list[int]) -> str:
    return next(filter(None, refusals(case, store, worlds)), "")


def _run(cases: list[Case], worlds: list[int], store: Path, folder: Path) -> list[dict[str, Any]]:
    wanted = run_references(cases, store)
    runs = {world: run_cases(cases, world, store, folder) for world in sorted({1, *worlds})}
    rows = []
    for i, case in enumerate(cases):
        one = runs[1][i][0]
        for world in worlds:
            its = runs[world][i]
            apart = max((compare(run, wanted[i] or one) for run in its), key=lambda a: (not a.is_close, a.dense, a.tables))
            same = all(run.samples == one.samples for run in its)
            row = {"case": str(case), "world": world, "same_steps": same, "close": same and apart.is_close, "idle": its[0].idle}
            rows.append({**row, **asdict(apart), "from_one_rank": asdict(compare(its[0], one))})
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    numbers = "  ".join(f"{name} {row[name]:.1e}" for name in ("loss", "dense", "tables"))
    more = f"  over the limit {row['over']}, unexplained {row['unexplained']}: {row['where']}" if row["over"] else ""
    return f"{row['case']:58} W{row['world']}  {numbers}{'' if row['close'] else '  NOT CLOSE'}{more}"


def _summary(rows: list[dict[str, Any]], refused: dict[Case, str], seconds: float) -> None:
    cases = {row["case"] for row in rows}
    print(f"\n{len(cases)} combinations run on {sorted({row['world'] for row in rows})} ranks, {len(refused)} refused; {seconds:.0f} s")
    for eps in EPS:
        its = [row for row in rows if ("eps=large" in row["case"]) == (eps == "large")]
        for name in ("loss", "dense", "tables") if its else ():
            worst = max(its, key=lambda row: row[name])
            print(f"eps {eps}: largest difference of {name}: {worst[name]:.1e} ({worst['case']}, {worst['world']} ranks)")
        if its:
            over, unexplained = (sum(row[name] for row in its) for name in ("over", "unexplained"))
            print(f"eps {eps}: {over} elements over {LIMIT:.0e} in {len(its)} runs, {unexplained} of them unexplained")
    print(f"not close: {sum(not row['close'] for row in rows)}")
    for text, count in Counter(text.splitlines()[0] for text in refused.values()).most_common():
        print(f"refused {count:4}: {text}")


if __name__ == "__main__":
    main()
