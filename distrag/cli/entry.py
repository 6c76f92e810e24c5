"""Finds the command, and ends the process as its outcome asks for."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from distrag.cli.words import COMMANDS, asks_debug

_FILES = {
    **dict.fromkeys(("prepare", "stats"), "data"),
    **dict.fromkeys(("plan", "bench"), "plans"),
    **dict.fromkeys(("train", "evaluate", "verify", "export", "report"), "runs"),
    **dict.fromkeys(("submit", "jobs"), "cluster"),
    "doctor": "doctor",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a fault of input ends in one clear message and exit code 2, with `--debug` in its traceback.

    Ctrl-C ends it with 130 and SIGTERM with 143; `train` saves first, and then ends with 130 or 75.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    if words[0] == "--version":
        from distrag import __version__

        print(__version__)
        return
    command = _command(words[0])
    with _stoppable(75 if words[0] == "train" else 143) as stopped:
        try:
            command(words[1:])
        except Exception as error:
            if stopped:  # an import that is interrupted may make another error of it
                raise SystemExit(stopped[0]) from None
            _fail(words, error)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except SystemExit as end:
            if said := getattr(end, "said", ""):
                print(f"distrag {words[0]}: {said}", file=sys.stderr)
            raise


def run() -> None:
    """Is the process of the command line: does what `main` does, and leaves at once where it failed.

    Taking torch down lasts seconds, in which the other ranks of a failed run would wait for this one.
    """
    try:
        main()
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not code:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _fail(words: Sequence[str], error: Exception) -> NoReturn:
    """Ends the process as an error of a command asks for."""
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone, as `head` does
        sys.stdout = None
        raise SystemExit(141) from None
    from distrag.leaving import RanksFailed

    is_lost = isinstance(error, RanksFailed)
    if asks_debug(words) or not (is_lost or isinstance(error, ValueError)):
        raise error
    print(f"distrag {words[0]}: {error}", file=sys.stderr)
    raise SystemExit(1 if is_lost else 2) from None


@contextmanager
def _stoppable(code: int) -> Iterator[list[int]]:
    """Makes Ctrl-C and SIGTERM end the block in order, and a second Ctrl-C end the process at once.

    Args:
        code: the exit code after a SIGTERM; after Ctrl-C it is 130.

    Returns:
        The exit code, once there is one.
    """
    stopped: list[int] = []

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stopped.append(130 if number == signal.SIGINT else code)
        if len(stopped) == 1:
            raise SystemExit(stopped[0])

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    changed = [number for number, old in former.items() if old in (signal.SIG_DFL, signal.default_int_handler)]
    changed = changed if threading.current_thread() is threading.main_thread() else []
    for number in changed:
        signal.signal(number, end)
    try:
        yield stopped
    finally:
        for number in changed:
            if not stopped:  # else the process ends, and another Ctrl-C should not meet Python's own handler
                signal.signal(number, former[number])


def _help() -> str:
    lines = "\n".join(f"  {name:9} {what}" for name, what in COMMANDS.items())
    return f"usage: distrag COMMAND ...\n\ncommands:\n{lines}\n\n`distrag COMMAND --help` tells what a command takes."


def _command(name: str) -> Callable[[list[str]], None]:
    import difflib

    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"distrag: no command {name!r}{hint}\n\n{_help()}", file=sys.stderr)
        raise SystemExit(2)
    command: Callable[[list[str]], None] = getattr(importlib.import_module(f"distrag.cli.{_FILES[name]}"), f"run_{name}")
    return command
