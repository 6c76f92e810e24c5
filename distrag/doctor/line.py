"""One line of the doctor's findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Line:
    """What was found of one thing.

    Attributes:
        name: of the thing, such as `fbgemm answers`.
        state: `ok`; `warning`, with which one can train; `problem`, with which one cannot.
        told: what was found.
        todo: the remedy; empty where there is nothing to mend.
    """

    name: str
    state: State
    told: str
    todo: str = ""


def describe_lines(lines: Sequence[Line]) -> str:
    """Returns the findings as text, remedies indented below, and a last line that counts."""
    rows = []
    for line in lines:
        first, *others = line.told.splitlines() or [""]
        rows += [f"{line.state:8} {line.name:22} {first}", *(f"{'':31} {other.strip()}" for other in others)]
        rows += [f"{'':31} -> {line.todo}"] if line.todo else []
    counts = {state: sum(line.state == state for line in lines) for state in ("problem", "warning")}
    return "\n".join([*rows, ", ".join(f"{count} {state}{'s' * (count != 1)}" for state, count in counts.items())])


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Returns the findings for a program: `healthy`, and `lines` with the attributes of `Line`."""
    return {"healthy": not any(line.state == "problem" for line in lines), "lines": [asdict(line) for line in lines]}
