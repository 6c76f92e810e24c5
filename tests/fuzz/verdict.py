"""Whether a command ended as a user can live with: done rightly, or refused in five parts or a line of usage, and nothing else."""

from __future__ import annotations

import re

from tests.fuzz.case import Case, Ended

PARTS = ("got:", "wanted:", "where:", "to do:")
_LEAKS = re.compile(r"Warning\b|^\[[WEF]\d{3,}|^[WEF]\d{4} |Exception ignored|^ERROR\b", re.MULTILINE)
_RAW = re.compile(
    r"object at 0x|NoneType|has no attribute|not subscriptable|<class '|unhashable|unexpected keyword|positional argument|not iterable"
)
"""What a library says to its own callers: nobody can mend a file by it."""


def refusal(ended: Ended) -> str:
    """Returns `refused` or `usage` for a message that a user can act on, else what is wrong with it."""
    if re.search(r"^usage: distrag", ended.err, re.MULTILINE) and re.search(r"^distrag[ \w-]*: error: ", ended.err, re.MULTILINE):
        return "usage"
    if re.match(r"distrag: no command ", ended.err):
        return "usage"
    start = re.search(r"^distrag \w+: (.+)$", ended.err, re.MULTILINE)
    at = [re.search(rf"^  {part} +\S.*$", ended.err, re.MULTILINE) for part in PARTS]
    places = [found.start() for found in at if found]
    if start is None or len(places) != len(PARTS) or places != sorted(places):
        return "no five parts"
    raw = _RAW.search(ended.err)
    return f"speaks of Python: {raw.group()!r}" if raw else "refused"


def judge(case: Case, ended: Ended, again: Ended | None = None) -> tuple[str, str]:
    """Returns the outcome, and what is wrong with it; an empty text for what is right.

    Args:
        case: what was run.
        ended: how it ended.
        again: how `case.then` ended, where it was run.
    """
    if ended.code is None:
        return "hang", f"did not end in {ended.seconds:.0f} s"
    if "Traceback (most recent call last)" in ended.err + ended.out or ended.code == 1:
        return "traceback", (ended.err.strip().splitlines() or ["exit code 1, no message"])[-1]
    if ended.code not in (0, 2):
        return "died", f"exit code {ended.code}"
    leak = _LEAKS.search(ended.err + ended.out)
    if leak:
        return "leak", f"a warning: {_line_of(ended.err + ended.out, leak.start())}"
    if ended.wrote:
        return "outside", f"wrote outside its folder: {', '.join(ended.wrote)}"
    if ended.code == 2:
        return _judge_refusal(case, ended)
    return _judge_result(case, ended, again)


def _judge_refusal(case: Case, ended: Ended) -> tuple[str, str]:
    how = refusal(ended)
    if how not in ("refused", "usage"):
        return "vague", how
    if case.expect == "fine":
        return "refused", "good input was refused"
    if case.names and not any(name in ended.err for name in case.names):
        return "vague", f"names none of {', '.join(case.names)}"
    return how, ""


def _judge_result(case: Case, ended: Ended, again: Ended | None) -> tuple[str, str]:
    if case.expect == "refused":
        return "silent", "went through"
    wrong = case.right(ended) if case.right else ""
    if wrong:
        return "silent", wrong
    if again is not None:
        outcome, why = judge(Case(case.kind, case.told, case.then, "refused"), again)
        return outcome, f"{' '.join(case.then[:1])}: {why}" if why else ""
    return "fine", ""


def _line_of(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 :].split("\n", 1)[0][:200]
