"""Writes what happened: metrics.jsonl, TensorBoard events and a progress line, all on rank 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class MetricsWriter:
    """The log of one run; on other ranks than 0 every call does nothing.

    Args:
        run_dir: where `metrics.jsonl` and `tensorboard/` are written.
        active: whether this rank writes.
        tensorboard: write TensorBoard events too.
        num_steps: length of the run, for the progress line.
    """

    def __init__(self, run_dir: Path, *, active: bool, tensorboard: bool, num_steps: int) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a") if active else None
        self._board: Any = None
        self._progress: Progress | None = None
        if active:
            self._progress = _progress()
            self._task = self._progress.add_task("training", total=num_steps, shown="")
            self._progress.start()
        if active and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one line, and one TensorBoard scalar per number.

        Args:
            kind: `train`, `valid` or `test`.
            step: global steps done.
            values: names and JSON-able values; NaN is written as null.
        """
        if self._file is None:
            return
        line = {"kind": kind, "step": step, **{key: finite(value) for key, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{key}", value, step)

    def show(self, step: int, text: str) -> None:
        """Moves the progress line to `step`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=text)

    def say(self, text: str) -> None:
        """Prints a line above the progress line."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the progress line and the files."""
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()


def finite(value: Any) -> Any:
    """Returns None for NaN and infinities, which JSON does not have; anything else as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress() -> Progress:
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.fields[shown]}"))
    return Progress(*columns, refresh_per_second=2)
