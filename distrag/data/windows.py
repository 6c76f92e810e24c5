"""Which events of a history are shown: the newest, the oldest, or a window that is drawn anew for each epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from distrag.data.counter import stream, uniform
from distrag.data.stochastic import Cost, solve_tau
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Truncate = Literal["newest", "oldest", "random_window", "stochastic"]
POLICIES: tuple[Truncate, ...] = get_args(Truncate)
DRAWN: tuple[Truncate, ...] = ("random_window", "stochastic")
"""Policies of training alone; valid and test then show the newest events."""

_STARTS, _LENGTHS = 1, 2  # what is drawn, so that the two laws of one seed have nothing to do with each other
_CHUNK = 16384  # numbers at a time, so that what is computed of them stays in the cache


@dataclass(frozen=True)
class View:
    """Samples of one part as windows of the store; nothing is copied from it.

    Attributes:
        rows: int64 `[n]`, row of the store.
        begin: int64 `[n]`, index of the oldest event of the history in the per-position arrays.
        end: int64 `[n]`, one past its newest event.
        next: int64 `[n]`, index of the event to predict after the history; -1 where there is none. It follows the history at once, but
            for held-out events of `oldest`.
        first: int64 `[n]`, index of the first event of the row; what lies between it and `next` has been seen.
        num_cut: events of the part left out of the histories; where windows are drawn, in this epoch.
        law: draws the windows of an epoch; None where they are always the same.
        epoch: the epoch that drawn windows belong to.
    """

    rows: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    next: NDArray[np.int64]
    first: NDArray[np.int64]
    num_cut: int
    law: Law | None = None
    epoch: int = 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of each history, int64 `[n]`."""
        return self.end - self.begin

    @property
    def seen_end(self) -> NDArray[np.int64]:
        """One past the newest event that came before the one to predict, int64 `[n]`; `[first, seen_end)` has been seen."""
        return np.where(self.next >= 0, self.next, self.end)

    def __len__(self) -> int:
        """Samples."""
        return len(self.rows)

    def at_epoch(self, epoch: int) -> View:
        """Returns the same samples with the windows of an epoch; the view itself where windows do not change.

        The same on every rank and for every number of ranks. The last one drawn is kept, so that whoever asks again gets the same object.
        """
        if self.law is None or epoch == self.epoch:
            return self
        kept: View | None = self.__dict__.get("_kept")
        if kept is None or kept.epoch != epoch:
            self.__dict__["_kept"] = kept = self.law.draw(self, epoch)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the epoch that is kept: a worker process draws its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_kept"}


class Law(Protocol):
    """How the windows of an epoch are drawn."""

    def draw(self, view: View, epoch: int) -> View:
        """Returns the view of `epoch`, from the view of any other."""
        ...


def cut(view: View, truncate: Truncate, max_len: int, *, seed: int = 0, tau: float = 0.0, follows: bool = False) -> View:
    """Returns a view of whole histories with at most `max_len` events of each.

    Args:
        view: whole histories: `begin` is `first`.
        truncate: which events stay.
        max_len: longest window.
        seed: of the draws.
        tau: of the law of `stochastic`.
        follows: where the window ends earlier than the history, the event right after it is the one to predict, if there was one at all;
            otherwise the view's own stays. Drawn windows are of training and always do so.
    """
    if truncate == "oldest":
        end = np.minimum(view.end, view.first + max_len)
        following = np.where(view.next >= 0, end, -1) if follows else view.next
        # A copy, since offsets of a store are read-only and compiled functions would be compiled once more for such an array.
        return replace(view, begin=view.begin.copy(), end=end, next=following, num_cut=int((view.end - end).sum()))
    if truncate == "random_window":
        long = np.flatnonzero(view.end - view.first > max_len)
        if len(long):
            return RandomWindow(seed, max_len, long, (view.end - view.first)[long] - max_len).draw(view, 0)
    if truncate == "stochastic" and tau < max_len:
        return StochasticLength(seed, max_len, tau).draw(view, 0)
    begin = np.maximum(view.first, view.end - max_len)
    return replace(view, begin=begin, num_cut=int((begin - view.first).sum()))


def check_cut(truncate: str, max_len: int, mean_cost_share: float) -> None:
    """Refuses what no history can be cut by.

    Raises:
        ValueError: an unknown policy, or a number out of its range.
    """
    if max_len < 1:
        todo = "give the number of events to keep"
        raise problem("Histories would be empty", got=max_len, wanted="at least 1", where="data.max_len", todo=todo)
    if truncate not in POLICIES:
        todo = "choose one of them"
        raise problem("Unknown way to cut", got=truncate, wanted=", ".join(POLICIES), where="data.truncate", todo=todo)
    if not 0 < mean_cost_share <= 1:
        todo = "give the share of the cost that shall be left"
        raise problem("Share out of range", got=mean_cost_share, wanted="above 0, at most 1", where="data.mean_cost_share", todo=todo)


def count_lengths(view: View, max_len: int) -> NDArray[np.int64]:
    """Returns how many histories of each length there are once the newest `max_len` events stay, int64 `[max_len+1]`."""
    return np.bincount(np.minimum(view.end - view.first, max_len), minlength=max_len + 1)


def find_tau(view: View, max_len: int, cost: Cost, share: float) -> float:
    """Returns the tau at which the histories of a view cost `share` of what their newest `max_len` events cost; see `solve_tau`."""
    return solve_tau(count_lengths(view, max_len), cost, share)


@dataclass(frozen=True)
class RandomWindow:
    """Each history longer than `max_len` shows as many events from a start that is drawn uniformly.

    Args:
        seed: of the draws.
        max_len: events of a window.
        long: int64 `[m]`, numbers of the samples that are longer.
        spare: int64 `[m]`, by how much.
    """

    seed: int
    max_len: int
    long: NDArray[np.int64]
    spare: NDArray[np.int64]

    def draw(self, view: View, epoch: int) -> View:
        """Returns the view of `epoch`; the event to predict is the one after the window."""
        begin, end, following = view.begin.copy(), view.end.copy(), view.next.copy()
        for part in _chunks(len(self.long)):
            samples = self.long[part]
            u = uniform(view.rows[samples], stream(_STARTS, self.seed, epoch))
            start = view.first[samples] + np.floor(u * (self.spare[part] + 1)).astype(np.int64)
            begin[samples] = start
            end[samples] = stop = start + self.max_len
            following[samples] = np.where(following[samples] >= 0, stop, -1)
        return replace(view, begin=begin, end=end, next=following, num_cut=int(self.spare.sum()), law=self, epoch=epoch)


@dataclass(frozen=True)
class StochasticLength:
    """The newest events of each history, as many as the law of `stochastic` draws.

    Args:
        seed: of the draws.
        max_len: longest window.
        tau: longest history that is never cut.
    """

    seed: int
    max_len: int
    tau: float

    def draw(self, view: View, epoch: int) -> View:
        """Returns the view of `epoch`; histories end where they always do."""
        begin, kept = np.empty(len(view), np.int64), 0
        key = stream(_LENGTHS, self.seed, epoch)
        for part in _chunks(len(view)):
            end = view.end[part]
            lengths = np.minimum(end - view.first[part], self.max_len)
            # 1 - u is in (0, 1], so that histories up to tau need no case of their own: what is drawn is never below tau.
            drawn = np.floor(self.tau / np.sqrt(1.0 - uniform(view.rows[part], key)))
            lengths = np.minimum(lengths, np.maximum(drawn, 1.0)).astype(np.int64)
            np.subtract(end, lengths, out=begin[part])
            kept += int(lengths.sum())
        num_cut = int((view.end - view.first).sum()) - kept
        return replace(view, begin=begin, num_cut=num_cut, law=self, epoch=epoch)


def _chunks(size: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, size, _CHUNK))
