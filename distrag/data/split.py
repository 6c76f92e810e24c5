"""Which events of which row are a sample's history, and which event comes next: splits as index arithmetic over offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distrag.data.counter import uniform
from distrag.data.windows import Truncate, check_cut, cut, find_tau
from distrag.data.windows import View as View
from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from distrag.data.stochastic import Cost
    from distrag.data.store import Store

Part = Literal["train", "valid", "test"]
Task = Literal["next_item", "conversion"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class SplitConfig:
    """How samples are divided into train, valid and test.

    Args:
        kind: `leave_one_out` keeps the last event of each row for test and the one before for valid; `time` cuts at two times;
            `row` gives each row to one part by a hash of its number.
        valid_share: share of rows, or of events in time, that is valid.
        test_share: share of rows, or of events in time, that is test.
        seed: of the hash of the row number.
        column: time feature to cut by; otherwise the first one there is.
        time_valid: first second that is no longer train; otherwise found from the shares.
        time_test: first second of test; otherwise found from the shares.
    """

    kind: Literal["leave_one_out", "time", "row"] = "leave_one_out"
    valid_share: float = 0.1
    test_share: float = 0.1
    seed: int = 0
    column: str | None = None
    time_valid: int | None = None
    time_test: int | None = None


def build_views(
    store: Store,
    split: SplitConfig,
    *,
    task: Task,
    max_len: int,
    fold_valid: bool = False,
    truncate: Truncate = "newest",
    mean_cost_share: float = 0.5,
    cost: Cost = (1.0, 0.0, 0.0),
    seed: int = 0,
) -> dict[Part, View]:
    """Returns the samples of train, valid and test.

    `next_item`: a history is followed by the event to predict. A train sample holds all train events of a row but the last, which is its
    `next`; rows with fewer than two of them stay, with nothing to predict. `leave_one_out` uses rows of fewer than three events for
    train only. `time` takes train events before the first cut; valid (test) predicts the first event from the first (second) cut on,
    from all events before that cut. `row` predicts the last event of the rows of valid and test; rows of fewer than two stay in train.

    `conversion`: the history is the whole row and the label is the target; split by `row` or by a per-sample `time`.

    Histories longer than `max_len` are cut as `truncate` says, see `DataConfig`. A train window that ends earlier than its history has the
    event right after it as `next`; valid and test keep the event they hold out. Where windows are drawn, train is that of epoch 0, and
    its `at_epoch` gives the others.

    Args:
        store: opened store.
        split: how to divide.
        task: what is predicted.
        max_len: longest history.
        fold_valid: whether train also holds what valid predicts, for a last fit once valid has chosen how long to train.
        truncate: which events of a longer history are kept.
        mean_cost_share: for `stochastic`: wanted mean cost of a train sample over that of `newest`.
        cost: for `stochastic`: `(a, b, c)`; a history of length L costs `a*L + b*L^2 + c`.
        seed: of the windows that are drawn.

    Raises:
        ValueError: when the split does not fit the task or the store, a share or `max_len` is out of range, or no cut is so cheap.
    """
    _check(split, task)
    check_cut(truncate, max_len, mean_cost_share)
    whole, tau = _build_whole(store, split, task, fold_valid), 0.0
    if truncate == "stochastic":
        # Of train alone, with valid folded in too: a refit is to train by the law that valid has chosen the best step of.
        alone = _build_whole(store, split, task, False) if fold_valid else whole
        tau = find_tau(alone["train"], max_len, cost, mean_cost_share)
    held_out: Truncate = "oldest" if truncate == "oldest" else "newest"
    views: dict[Part, View] = {"train": cut(whole["train"], truncate, max_len, seed=seed, tau=tau, follows=True)}
    return views | {part: cut(whole[part], held_out, max_len) for part in PARTS[1:]}


def _build_whole(store: Store, split: SplitConfig, task: Task, fold_valid: bool) -> dict[Part, View]:
    """Returns the samples of each part with their whole histories."""
    if task == "conversion":
        return _conversion(store, split, fold_valid)
    if split.kind == "leave_one_out":
        return _leave_one_out(store, fold_valid)
    return (_next_by_time if split.kind == "time" else _next_by_row)(store, split, fold_valid)


def row_parts(num_rows: int, split: SplitConfig) -> NDArray[np.int8]:
    """Returns the part of each row, int8 `[num_rows]` (0 train, 1 valid, 2 test), by a counter hash of the row number alone."""
    u = uniform(np.arange(num_rows), split.seed)
    return np.where(u < split.test_share, 2, np.where(u < split.test_share + split.valid_share, 1, 0)).astype(np.int8)


def _leave_one_out(store: Store, fold_valid: bool) -> dict[Part, View]:
    starts, n = store.offsets[:-1], store.lengths
    enough = np.flatnonzero(n >= 3)
    stops = starts[enough] + n[enough]
    return {
        "train": _train(np.arange(len(n)), starts, np.where(n >= 3, n - 2 + fold_valid, n)),
        "valid": _view(enough, starts[enough], stops - 2, stops - 2),
        "test": _view(enough, starts[enough], stops - 1, stops - 1),
    }


def _next_by_row(store: Store, split: SplitConfig, fold_valid: bool) -> dict[Part, View]:
    starts, n = store.offsets[:-1], store.lengths
    part = np.where(n >= 2, row_parts(len(n), split), 0)
    rows = [np.flatnonzero(part == i) for i in range(3)]
    fitted = np.flatnonzero(part <= fold_valid)
    views: dict[Part, View] = {"train": _train(fitted, starts[fitted], n[fitted])}
    for name, chosen in zip(PARTS[1:], rows[1:], strict=True):
        last = starts[chosen] + n[chosen] - 1
        views[name] = _view(chosen, starts[chosen], last, last)
    return views


def _next_by_time(store: Store, split: SplitConfig, fold_valid: bool) -> dict[Part, View]:
    name = _time_column(split, [f.name for f in store.schema.history if f.kind == "time"], "per-position")
    times, starts, stops = store.position(name), store.offsets[:-1], store.offsets[1:]
    _check_sorted(store, times, name)
    cuts = _cuts(times, split)
    before = [starts + _count_before(times, store.offsets, cut) for cut in cuts]
    views: dict[Part, View] = {"train": _train(np.arange(len(starts)), starts, before[int(fold_valid)] - starts)}
    for part, at, until in (("valid", before[0], before[1]), ("test", before[1], stops)):
        rows = np.flatnonzero(until > at)
        views["valid" if part == "valid" else "test"] = _view(rows, starts[rows], at[rows], at[rows])
    return views


def _conversion(store: Store, split: SplitConfig, fold_valid: bool) -> dict[Part, View]:
    if split.kind == "time":
        name = _time_column(split, [f.name for f in store.schema.context if f.kind == "time"], "per-sample")
        times = store.context(name)
        valid, test = _cuts(times, split)
        part = (times >= valid).astype(np.int8) + (times >= test)
    else:
        part = row_parts(store.num_samples, split)
    views: dict[Part, View] = {}
    for i, name_of_part in enumerate(PARTS):
        rows = np.flatnonzero(part <= fold_valid if i == 0 else part == i)
        views[name_of_part] = _view(rows, store.offsets[rows], store.offsets[rows + 1], np.full(len(rows), -1, np.int64))
    return views


def _train(rows: NDArray[np.int64], starts: NDArray[np.int64], events: NDArray[np.int64]) -> View:
    end = starts + np.maximum(events - 1, 0)
    return _view(rows, starts, end, np.where(events >= 2, end, -1))


def _view(rows: NDArray[np.int64], starts: NDArray[np.int64], end: NDArray[np.int64], following: NDArray[np.int64]) -> View:
    return View(rows, starts, end, following, starts, 0)


def _count_before(times: NDArray[np.int64], offsets: NDArray[np.int64], cut: int) -> NDArray[np.int64]:
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(times < cut)])
    counts: NDArray[np.int64] = total[offsets[1:]] - total[offsets[:-1]]
    return counts


def _cuts(times: NDArray[np.int64], split: SplitConfig) -> tuple[int, int]:
    shares = (1 - split.valid_share - split.test_share, 1 - split.test_share)
    given = (split.time_valid, split.time_test)
    if not len(times) and None in given:
        raise problem(
            "No times to find the cuts from", got="0 events", wanted="events", where="data.split", todo="give time_valid and time_test"
        )
    found = [int(np.quantile(times, s, method="higher")) if t is None else t for t, s in zip(given, shares, strict=True)]
    if found[0] > found[1]:
        got = f"time_valid {found[0]} after time_test {found[1]}"
        raise problem(
            "The cuts are in the wrong order", got=got, wanted="time_valid <= time_test", where="data.split", todo="give both, or neither"
        )
    return found[0], found[1]


def _time_column(split: SplitConfig, names: list[str], what: str) -> str:
    if split.column in names:
        return str(split.column)
    if split.column is not None or not names:
        todo = "name one of these in data.split.column" if names else "prepare the store with a time feature, or use data.split.kind: row"
        raise problem(f"No such {what} time feature", got=split.column, wanted=f"one of {names}", where="data.split.column", todo=todo)
    return names[0]


def _check_sorted(store: Store, times: NDArray[np.int64], name: str) -> None:
    falls = np.flatnonzero(times[1:] < times[:-1]) + 1
    starts = store.offsets[np.searchsorted(store.offsets, falls, side="right") - 1]
    inside = falls[starts != falls]
    if len(inside):
        row = int(np.searchsorted(store.offsets, inside[0], side="right")) - 1
        where = f"{store.path}, feature {name!r}, row {row}, position {inside[0] - store.offsets[row]}"
        got = f"{times[inside[0] - 1]} then {times[inside[0]]}"
        raise problem(
            "Events are not in order of time",
            got=got,
            wanted="times that never fall",
            where=where,
            todo="split by the time that prepare sorted by",
        )


def _check(split: SplitConfig, task: str) -> None:
    def refuse(what: str, got: Any, wanted: str, key: str, todo: str) -> None:
        raise problem(what, got=got, wanted=wanted, where=key, todo=todo)

    if task not in ("next_item", "conversion"):
        refuse("Unknown task", task, "next_item or conversion", "task", "choose one of them")
    if split.kind not in ("leave_one_out", "time", "row"):
        refuse("Unknown split", split.kind, "leave_one_out, time or row", "data.split.kind", "choose one of them")
    if task == "conversion" and split.kind == "leave_one_out":
        refuse(
            "The split does not fit the task",
            "leave_one_out with conversion",
            "row or time",
            "data.split.kind",
            "set data.split.kind to row",
        )
    shares = (split.valid_share, split.test_share)
    if min(shares) < 0 or sum(shares) > 1:
        refuse("Shares out of range", shares, "at least 0 each, at most 1 together", "data.split", "mend valid_share and test_share")
