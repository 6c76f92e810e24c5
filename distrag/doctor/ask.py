"""Questions to a process of its own: one that crashes, hangs or cannot import takes nothing down but itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class NoAnswer(Exception):
    """The process ended without an answer; the message is its last words."""


def ask(question: str, *words: str, limit_s: float = 90.0) -> dict[str, Any]:
    """Returns what `distrag.doctor.child` answers.

    Args:
        question: a name of its `QUESTIONS`.
        words: its arguments.
        limit_s: how long it may take, in seconds; then it is killed.

    Raises:
        NoAnswer: it failed, crashed or took too long.
    """
    return ask_together([(question, *words)], limit_s)[0]


def ask_together(questions: Sequence[Sequence[str]], limit_s: float) -> list[dict[str, Any]]:
    """Returns the answers to questions that need each other, asked at the same time.

    Raises:
        NoAnswer: one of them has failed; all are ended.
    """
    asked = [_start(words) for words in questions]
    try:
        return [_answer(process, limit_s) for process in asked]
    finally:
        for process in asked:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "distrag.doctor.child", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _answer(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {limit_s:.0f} s") from None
    told = out.strip().splitlines()
    if process.returncode == 0 and told:
        answer: dict[str, Any] = json.loads(told[-1])
        return answer
    if process.returncode < 0:
        raise NoAnswer(f"it died of {signal.Signals(-process.returncode).name}: {_last(err)}")
    raise NoAnswer(_last(err) or f"exit code {process.returncode}")


def _last(text: str) -> str:
    """Returns the message of an error: all of it where it is distrag's, else the last line."""
    _, mark, after = text.strip().rpartition("\nValueError: ")
    return after if mark else (text.strip().splitlines() or [""])[-1][:500]
