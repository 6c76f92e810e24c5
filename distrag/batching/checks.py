"""What a plan refuses before it looks at a length: numbers that are none, lengths and sample numbers that cannot be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from distrag.batching.compiled import Ints

MAX_RANKS = 65_536
_MOST = 2**62


def check_numbers(world_size: Any, cost: Any, seed: Any, epoch: Any, *, first_step: Any, **sizes: Any) -> None:
    """Refuses budgets, ranks, costs and seeds that are no numbers or out of range.

    Args:
        world_size: ranks.
        cost: `(a, b, c)`.
        seed: of the shuffle.
        epoch: number of the epoch.
        first_step: number of the first step.
        **sizes: what must be at least 1; None where it is not given.

    Raises:
        ValueError: for the first of them that cannot be, named.
    """
    if sizes["max_tokens"] is None and sizes["global_tokens"] is None:
        raise problem("No token budget", got="neither", wanted="max_tokens or global_tokens", where="batching", todo="set one of them")
    for name, value in sizes.items():
        if value is not None:
            _check_whole(value, f"batching.{name}", 1, _MOST)
    _check_whole(world_size, "world_size", 1, MAX_RANKS)
    _check_whole(seed, "seed", -(2**63), 2**64)
    _check_whole(epoch, "epoch", 0, 2**63)
    _check_whole(first_step, "first_step", 0, _MOST)
    try:
        parts = [float(part) for part in cost]
    except (TypeError, ValueError):
        parts = []
    if isinstance(cost, str) or len(parts) != 3 or not all(math.isfinite(part) and part >= 0 for part in parts):
        todo = "pass the encoder's cost"
        raise problem("A cost is negative or no cost", got=cost, wanted="three numbers a, b, c >= 0", where="plan_epoch(cost=)", todo=todo)


def _check_whole(value: Any, where: str, low: int, high: int) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not low <= value <= high:
        what = "A number is no integer" if isinstance(value, bool) or not isinstance(value, int | np.integer) else "A size is out of range"
        raise problem(what, got=value, wanted=f"an integer from {low:,} to {high:,}", where=where, todo=f"mend {where.split('.')[-1]}")


def as_lengths(lengths: ArrayLike) -> Ints:
    """Returns lengths as the compiled code reads them: int64 and int32 in place, others as int64.

    Raises:
        ValueError: for what is no list of integers, or too large to add up.
    """
    sizes = _as_integers(lengths, "Lengths are no list of integers", "lengths, [N]", "pass one length a sample")
    if sizes.dtype in (np.int64, np.int32):
        pass
    elif sizes.dtype.kind == "u" and len(sizes) and int(sizes.max()) >= 2**63:
        raise _too_long(int(sizes.max()))
    else:
        sizes = np.ascontiguousarray(sizes, np.int64)
    if sizes.dtype == np.int64 and len(sizes) and int(sizes.max()) > _MOST // len(sizes):
        raise _too_long(int(sizes.max()))
    return sizes


def as_samples(samples: ArrayLike, num_samples: int) -> Ints:
    """Returns sample numbers as int64.

    Raises:
        ValueError: for what is no list of integers, for a number that no sample has, and for one that comes twice.
    """
    chosen = np.ascontiguousarray(_as_integers(samples, "Samples are no list of integers", "sample numbers", "pass numbers"), np.int64)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < num_samples:
        bad = int(chosen[(chosen < 0) | (chosen >= num_samples)][0])
        todo = "pass numbers of samples that there are"
        raise problem("No such sample", got=bad, wanted=f"0 to {num_samples - 1}", where="plan_epoch(samples=)", todo=todo)
    seen = np.zeros(num_samples, np.bool_)
    seen[chosen] = True
    if int(seen.sum()) != len(chosen):
        got, todo = f"{len(chosen):,} numbers of {int(seen.sum()):,} samples", "pass each number once"
        raise problem("A sample comes twice", got=got, wanted="each once", where="plan_epoch(samples=)", todo=todo)
    return chosen


def _as_integers(values: Any, what: str, wanted: str, todo: str) -> Ints:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise problem(what, got=str(error), wanted=wanted, where="plan_epoch", todo=todo) from None
    if array.ndim == 1 and not len(array):
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise problem(what, got=f"{array.dtype} of shape {array.shape}", wanted=f"integers: {wanted}", where="plan_epoch", todo=todo)
    return array


def _too_long(length: int) -> ValueError:
    todo = "pass lengths in tokens"
    return problem("Lengths are too large to add up", got=length, wanted="a sum below 2^62", where="plan_epoch(lengths)", todo=todo)


def check_steps_done(steps_done: Any) -> None:
    """Refuses steps done that are no count.

    Raises:
        ValueError: for anything but an integer of at least 0.
    """
    _check_whole(steps_done, "steps_done", 0, _MOST)


def check_state(state: Any) -> None:
    """Refuses what no `state_dict` has given, so that a damaged state skips or repeats nothing.

    Raises:
        ValueError: for missing or unknown parts, numbers that are none, and counts that contradict each other.
    """
    keys = ("seed", "epoch", "steps_done", "fingerprint", "content_hash", "parts")
    if not isinstance(state, dict) or any(key not in state for key in keys):
        missing = ", ".join(key for key in keys if key not in state) if isinstance(state, dict) else ""
        raise _no_state(f"a dict without {missing}" if missing else f"a {type(state).__name__}", f"a dict of {', '.join(keys)}")
    _check_whole(state["seed"], "seed", -(2**63), 2**64)
    _check_whole(state["epoch"], "epoch", 0, 2**63)
    check_steps_done(state["steps_done"])
    if not isinstance(state["fingerprint"], str) or not state["fingerprint"] or not isinstance(state["content_hash"], str):
        raise _no_state(f"hashes {state['fingerprint']!r} and {state['content_hash']!r}", "the hashes of state_dict")
    parts = state["parts"]
    if not isinstance(parts, list) or not parts or not all(_is_part(part) for part in parts):
        raise _no_state(f"parts {str(parts)[:200]}", "a list of options and the step until which they held")
    until = [part["until"] for part in parts]
    if sorted(until) != until or until[0] < 0 or until[-1] != state["steps_done"]:
        raise _no_state(f"parts until {until}, {state['steps_done']} steps done", "counts that rise to the steps done")


def _is_part(part: Any) -> bool:
    options = ("world_size", "max_tokens", "global_tokens", "max_samples", "bucket_steps", "cost")
    if not isinstance(part, dict) or type(part.get("until")) is not int or not isinstance(part.get("options"), dict):
        return False
    return all(name in part["options"] for name in options) and isinstance(part["options"]["cost"], list | tuple)


def _no_state(got: str, wanted: str) -> ValueError:
    return problem("Not the state of a sampler", got=got, wanted=wanted, where="load_state_dict", todo="pass what state_dict has given")
