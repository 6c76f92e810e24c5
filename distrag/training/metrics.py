"""Writes what happened: metrics.jsonl, TensorBoard events and a progress line on rank 0, and the samples of each step on every rank."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distrag.checkpoint import write_whole
from distrag.data.text_file import read_small

SAMPLES = "samples"
_MOST_BYTES = 1 << 40


class MetricsWriter:
    """The log of one run; on other ranks than 0 every call does nothing.

    Args:
        run_dir: where `metrics.jsonl` and `tensorboard/` are written.
        active: whether this rank writes.
        tensorboard: write TensorBoard events too.
    """

    def __init__(self, run_dir: Path, *, active: bool, tensorboard: bool) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a") if active else None
        self._boards = run_dir / "tensorboard" if active and tensorboard else None
        self._board: Any = None
        self._progress: Progress | None = None
        if active:
            self._progress = _progress()
            self._task = self._progress.add_task("training", total=None, shown="")
            self._progress.start()

    def begin(self, phase: str, num_steps: int, done: int = 0) -> None:
        """Begins or goes on with the steps of a phase, which are numbered from 1 in each.

        Args:
            phase: `train` or `refit`, which has TensorBoard events in a folder of its own.
            num_steps: length of the phase, for the progress line.
            done: steps that a resumed run has behind it; TensorBoard forgets the later ones of the run that was cut.
        """
        if self._progress is not None:
            name = {"train": "training"}.get(phase, phase)
            self._progress.reset(self._task, total=num_steps, completed=done, description=name, shown="")
        if self._boards is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._close_board()
            folder = self._boards if phase == "train" else self._boards / phase
            self._board = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one line, and one TensorBoard scalar per number.

        Args:
            kind: `train`, `valid`, `refit`, `resume`, `stop`, `skipped` or `test`.
            step: global steps done.
            values: names and JSON-able values; NaN is written as null.
        """
        if self._file is None:
            return
        line = {"kind": kind, "step": step, **{key: finite(value) for key, value in values.items()}}
        _append(self._file, line)
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
        self._close_board()
        if self._file is not None:
            _close(self._file)

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()


class SampleLog:
    """`samples/rank-<r>.jsonl`: the sample numbers of every step this rank trained, one JSON object a line.

    Args:
        run_dir: folder of the run.
        rank: this rank.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        (run_dir / SAMPLES).mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (run_dir / SAMPLES / f"rank-{rank}.jsonl").open("a")

    def write(self, kind: str, step: int, epoch: int, samples: list[int]) -> None:
        """Appends one step.

        Args:
            kind: `train` or `refit`.
            step: global steps done, this one included.
            epoch: number of the epoch.
            samples: sample numbers in the train view; a dummy is none.
        """
        _append(self._file, {"kind": kind, "step": step, "epoch": epoch, "samples": samples})

    def close(self) -> None:
        """Ends the file."""
        _close(self._file)


def _append(file: TextIO, line: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(line) + "\n")
        file.flush()  # what a killed process had not given away yet is lost
    except OSError as error:
        error.filename = file.name  # of a full disk Python does not say where
        raise


def _close(file: TextIO) -> None:
    with suppress(OSError):  # all was flushed, and what could not be was said then
        file.close()


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> Counter[str]:
    """Rewrites a file of JSON lines, whole or not at all, with the lines that `keep` says; a line that was cut is dropped.

    Returns:
        How many lines of each kind were kept.
    """
    if not os.path.lexists(path):
        return Counter()
    content = read_small(path, what="A log of the run", todo="put it back as the run wrote it, or remove it", most_bytes=_MOST_BYTES)
    kinds = [(line, _kind_if(line, keep)) for line in content.decode("utf-8", errors="replace").split("\n")]
    write_whole(path, "".join(f"{line}\n" for line, kind in kinds if kind is not None))
    return Counter(kind for _, kind in kinds if kind is not None)


def _kind_if(line: str, keep: Callable[[dict[str, Any]], bool]) -> str | None:
    try:
        content = json.loads(line)
        return str(content["kind"]) if keep(content) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # cut, or no line of ours


def finite(value: Any) -> Any:
    """Returns None for NaN and infinities, which JSON does not have; anything else as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress() -> Progress:
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.fields[shown]}"))
    return Progress(*columns, refresh_per_second=2)
