"""The answer of `distrag verify` in words."""

from __future__ import annotations

import json
from typing import Any

from distrag.training.metrics import finite


def describe_verify(numbers: dict[str, Any]) -> str:
    """Returns the table of differences and the verdict.

    Args:
        numbers: from `verify`.
    """
    moved = numbers["moved"]
    lines = [
        f"{numbers['steps']} steps on {numbers['device']}, beside 1 rank; loss {numbers['losses'][0]:.4f} -> {numbers['losses'][-1]:.4f}; "
        f"dense parameters moved by up to {moved['dense']:.2g}, tables by {moved['tables']:.2g}"
    ]
    lines += [f"changed for the comparison: {change}" for change in numbers["changed"]]
    lines += ["", f"{'':22} {'loss':>9} {'dense':>9} {'tables':>9}  {'idle':>5} {'s':>6}"]
    lines += [_line(row) for row in numbers["rows"]]
    return "\n".join([*lines, "", _verdict(numbers)])


def verify_json(numbers: dict[str, Any]) -> str:
    """Returns the numbers as JSON, which has no NaN."""
    rows = [{key: finite(value) for key, value in row.items()} for row in numbers["rows"]]
    return json.dumps({**numbers, "losses": [finite(loss) for loss in numbers["losses"]], "rows": rows}, indent=1)


def _line(row: dict[str, Any]) -> str:
    if row["note"]:
        return f"{row['name']:22} {row['note']}"
    line = f"{row['name']:22} {row['loss']:9.1e} {row['dense']:9.1e} {row['tables']:9.1e}  {row['idle']:5} {row['seconds']:6.1f}"
    if row["exact"]:
        return line
    step = f"; losses part at step {row['first_step']}" if row["first_step"] else ""
    return f"{line}  {row['where']}: {row['got']:.7g}, on 1 rank {row['wanted']:.7g}{step}"


def _verdict(numbers: dict[str, Any]) -> str:
    rows, tolerance = numbers["rows"], numbers["tolerance"]
    wrong = [row["name"] for row in rows if not row["exact"]]
    if wrong:
        why = (
            "A model that looks beyond its own sequence, or asks for its rank, or draws at random by anything but the keys it is given, "
            "does that; so does one whose rounding grows: see whether the difference falls with the rates."
        )
        return f"NOT EQUAL within {tolerance:g}: {', '.join(wrong)}. {why}"
    if not numbers["moved"]["dense"] and not numbers["moved"]["tables"]:
        return f"equal within {tolerance:g}, but nothing has moved: this shows little"
    return f"equal within {tolerance:g}: losses of every step, dense parameters and whole tables"
