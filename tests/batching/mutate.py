"""Breaks each promise of the planned epoch on purpose, in a copy, and shows which test fails: `python -m tests.batching.mutate [WORD ...]`.

Words choose the mutations whose row has all of them. Exits with 1 where one survives: then the tests have a hole.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.batching.mutations import Mutation, broken
from tests.batching.mutations_epoch import OF_THE_EPOCH
from tests.batching.mutations_plan import OF_THE_PLAN

MUTATIONS = (*OF_THE_PLAN, *OF_THE_EPOCH)
ROOT = Path(__file__).resolve().parents[2]
TESTS = ("plan", "sampler", "loader", "nodes", "layout", "pool", "polish", "deal", "rows", "survey", "checks")
LIMIT_S = 900
SOURCES = broken(
    "",
    "",
    "compiled.py",
    'Path(__file__).parent.glob("*.py")',
    'filter(lambda p: b"\\n@compiled" in p.read_bytes(), Path(__file__).parent.glob("*.py"))',
)
"""What a copy's compiled code belongs to: only what is compiled, so that other mutations need not compile it again."""


def main() -> int:
    """Runs the mutations and prints a row for each; returns the exit code."""
    chosen = [one for one in MUTATIONS if all(word in f"{one.promise} {one.what} {one.file}" for word in sys.argv[1:])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "copy"
        for name in ("distrag", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for one in MUTATIONS:
            mutated_source(copy, one)
        (copy / "distrag/batching/compiled.py").write_text(mutated_source(copy, SOURCES))
        killer, seconds = _killer(copy, "plan.py", copy.parent / "cache")
        if killer:
            print(f"the tests fail without a mutation: {killer}")
            return 1
        print(
            f"without a mutation all tests pass, in {seconds:.0f} s\n\n| promise | broken | killed by | s |\n|---|---|---|---|", flush=True
        )
        survived = sum(not _try(copy, one) for one in chosen)
    print(f"\n{len(chosen)} mutations, {survived} survived, {time.monotonic() - started:.0f} s")
    return 1 if survived else 0


def mutated_source(copy: Path, mutation: Mutation) -> str:
    """Returns the source of the mutated file.

    Raises:
        ValueError: text that is to be broken does not stand there exactly once: the mutation has to follow the source.
    """
    text = (copy / "distrag/batching" / mutation.file).read_text()
    for old, new in mutation.edits:
        if text.count(old) != 1 or old == new:
            raise ValueError(f"{mutation.promise}, {mutation.what}: {old!r} stands {text.count(old)} times in {mutation.file}")
        text = text.replace(old, new)
    return text


def _try(copy: Path, mutation: Mutation) -> bool:
    """Runs the tests on a mutated copy and prints the row; returns whether one failed."""
    path, cache = copy / "distrag/batching" / mutation.file, copy.parent / "mutated"
    text, kept = mutated_source(copy, mutation), copy.parent / "kept"
    shutil.copytree(copy.parent / "cache", cache)
    shutil.copy2(path, kept)
    path.write_text(text)
    try:
        killer, seconds = _killer(copy, mutation.file, cache)
    finally:
        shutil.copy2(kept, path)  # with its time, by which numba knows it
        shutil.rmtree(cache)
    print(f"| {mutation.promise} | {mutation.what} ({mutation.file}) | {killer or '**survived**'} | {seconds:.0f} |", flush=True)
    return killer is not None


def _killer(copy: Path, file: str, cache: Path) -> tuple[str | None, float]:
    """Returns the first test that fails in the copy, or None, and the seconds it took.

    Raises:
        RuntimeError: what failed is not a test: the mutation is no program.
    """
    first = Path(file).stem if Path(file).stem in TESTS[:4] else TESTS[0]
    paths = [f"tests/batching/test_{name}.py" for name in (first, *(name for name in TESTS if name != first))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=short", "--hypothesis-profile=few", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *(path for path in paths if (copy / path).exists())],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {LIMIT_S} s", time.monotonic() - started
    seconds = time.monotonic() - started
    failed = re.search(r"^FAILED tests/batching/test_(\S+\.py::[^\s\[]+)", done.stdout, re.MULTILINE)
    broken = re.search(r"^E +(numba\.core|NameError|SyntaxError|TypeError|AttributeError|UnboundLocalError)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or broken or (done.returncode == 1) != bool(failed):
        raise RuntimeError(f"{file}: no test failed, something else did:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")
    return (failed.group(1) if failed else None), seconds


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
