"""Runs one command line in a fork of this process, which has imported everything, as a fresh `distrag` would run it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.case import Ended, Room

MOST_BYTES = 6 << 30
"""Address space beyond what this process has: a case that would fill the machine fails alone."""
MOST_FILE = 1 << 29
_WRITES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.link": ((1, 3),),
    "os.truncate": ((0, None),),
}
"""Events of Python's audit that change a file system: which argument is the path, and which the folder it is relative to."""


def run_words(words: Sequence[str], room: Room, limit_s: float) -> Ended:
    """Returns how `distrag WORDS` ended, called from `room.here`; killed after `limit_s` seconds."""
    out, err, wrote = (room.out.parent / name for name in ("stdout", "stderr", "wrote"))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ warns of threads at a fork
        pid = os.fork()
    if pid == 0:
        _child(words, room, out, err, wrote)
    code = _wait(pid, started + limit_s)
    seconds = time.monotonic() - started
    found = pickle.loads(wrote.read_bytes()) if wrote.exists() else ()
    return Ended(code, _read(out), _read(err), seconds, tuple(found))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _wait(pid: int, deadline: float) -> int | None:
    pause = 0.002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGUSR1)  # its stack goes to its stderr
            time.sleep(0.3)
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause)
        pause = min(0.02, pause * 1.3)


def _child(words: Sequence[str], room: Room, out: Path, err: Path, wrote: Path) -> None:
    gc.freeze()
    os.setpgid(0, 0)
    code = 99
    try:
        with out.open("wb") as o, err.open("wb") as e:
            os.dup2(o.fileno(), 1)
            os.dup2(e.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        as_a_user_has_it(room)
        outside = _watch_writes(room)
        code = call(words)
        wrote.write_bytes(pickle.dumps(sorted(outside)))
    finally:
        os._exit(code)


def call(words: Sequence[str]) -> int:
    """Returns the exit code that `distrag WORDS` has, after what it prints."""
    from distrag.cli import main

    try:
        main(list(words))
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return code


def as_a_user_has_it(room: Room) -> None:
    """Python's own filters of warnings, limits that keep a runaway case from harming others, and temporary files in the room."""
    warnings.showwarning = lambda message, category, file, line, *_: sys.stderr.write(warnings.formatwarning(message, category, file, line))
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(room.here)
    os.environ["PWD"] = str(room.here)
    tempfile.tempdir = str(room.out)


def _watch_writes(room: Room) -> set[str]:
    """Returns a set that fills with the paths outside `room.out` that Python opens to write, makes, moves or removes."""
    outside: set[str] = set()
    allowed = (str(room.out.resolve()), "/dev/null", "/dev/shm", "/proc")

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = (
                any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            )
            found = [(path, -1)] if writes else []
        else:
            found = [(args[place], args[folder] if folder is not None else -1) for place, folder in _WRITES.get(event, ())]
        for path, folder in found:
            if isinstance(path, str | bytes | os.PathLike):
                base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else ""
                whole = os.path.join(base, os.fsdecode(path))
                # What is renamed or removed is the link itself; what is opened is what it leads to.
                whole = (
                    os.path.realpath(whole)
                    if event == "open"
                    else os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
                )
                if not whole.startswith(allowed) and "/__pycache__" not in whole:
                    outside.add(whole)

    sys.addaudithook(look)
    return outside
