"""`distrag plan CONFIG --max-memory 0.8`: the largest token budget of a rank whose training steps stay under a limit, found by trying."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distrag.config import RunConfig
from distrag.config.limits import INT32
from distrag.problem import problem
from distrag.training.composition import walk_plan
from distrag.training.footprint import measure_step, table_bytes
from distrag.training.plan import Subject, open_subject
from distrag.training.trial import check_view
from distrag.training.weigh import COMPOSITIONS, open_scales

Ints = np.ndarray[Any, np.dtype[np.int64]]

Peaks = dict[str, int]
Weigh = Callable[[int], Peaks]
"""Budget in tokens -> peak in bytes of each composition that was tried; those that ran out of memory are above the limit."""

CLOSE = 1.05  # a budget this near below one that is too large is near enough
MOST_TRIALS = 16
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Limit:
    """What `--max-memory` asks for: a share of the device, or bytes.

    Attributes:
        text: as it was given.
        share: of the GPU's memory, or of what the machine has free; 0 where bytes were given.
        size: in bytes; 0 where a share was given.
    """

    text: str
    share: float
    size: int

    def of(self, whole: int) -> int:
        """Returns the limit in bytes on a device of `whole` bytes."""
        return int(self.share * whole) if self.share else self.size


def parse_limit(text: str) -> Limit:
    """Returns what a word such as `0.8`, `2GiB` or `500MB` asks for.

    Raises:
        ValueError: neither a share above 0 and at most 1, nor a size of at least 1 byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt]?)(i?)b)?\s*", text, re.IGNORECASE)
    if found:
        number, sized = float(found[1]), found[2] is not None
        size = number * (1024 if found[3] else 1000) ** _UNITS[(found[2] or "").lower()]
        if sized and 1 <= size < 2**60:
            return Limit(text.strip(), 0.0, int(size))
        if not sized and 0 < number <= 1:
            return Limit(text.strip(), number, 0)
    raise problem(
        "Not an amount of memory",
        got=text,
        wanted="a share above 0 and at most 1, such as 0.8, or a size, such as 2GiB or 500MB",
        where="--max-memory",
        todo="give one of the two",
    )


@dataclass(frozen=True)
class Found:
    """What the search came to.

    Attributes:
        max_tokens: largest budget that fits.
        peaks: peak of each composition at that budget, in bytes.
        too_large: smallest budget that was seen not to fit; 0 where the whole view fits on one rank.
        trials: each budget that was tried and its peaks, in order.
    """

    max_tokens: int
    peaks: Peaks
    too_large: int
    trials: list[tuple[int, Peaks]]


def find_budget(weigh: Weigh, low: int, high: int, limit: int, per_token: float) -> Found:
    """Returns the largest budget between `low` and `high` whose peaks all stay at or under the limit, to about 5 %.

    Peaks grow almost in a line with the budget, so the next budget to try lies a little below where the line through the two largest
    that fit meets the limit; beside one that does not fit it stays between the two. The one that is found is weighed once more: peaks on
    the CPU differ by a few percent from time to time.

    Args:
        weigh: tries a budget.
        low: smallest budget that makes sense.
        high: the largest; all tokens of the view.
        limit: in bytes.
        per_token: bytes that a token is expected to take, for the first guess.

    Raises:
        ValueError: `low` does not fit.
    """
    trials: list[tuple[int, Peaks]] = []
    seen: dict[int, int] = {}  # budget -> largest peak

    def attempt(budget: int) -> None:
        peaks = weigh(budget)
        trials.append((budget, peaks))
        seen[budget] = max(seen.get(budget, 0), *peaks.values())

    attempt(low)
    while len(trials) < MOST_TRIALS:
        fits, bad = _sides(seen, limit)
        if not fits:
            raise _too_little(low, trials[0][1], limit)
        best = fits[-1][0]
        if best >= high or (bad and bad <= CLOSE * best) or (len(fits) > 1 and fits[-1][1] > limit / CLOSE):
            if sum(budget == best for budget, _ in trials) > 1:
                break
            attempt(best)
        else:
            attempt(_next_budget(fits, bad, high, limit, per_token))
    fits, bad = _sides(seen, limit)
    best = fits[-1][0]
    peaks = {name: max(its.get(name, 0) for budget, its in trials if budget == best) for name in trials[-1][1]}
    return Found(best, peaks, bad, trials)


def _sides(seen: Mapping[int, int], limit: int) -> tuple[list[tuple[int, int]], int]:
    """Returns budgets that fit with their peaks, rising, and the smallest that does not (0 for none); nothing above that one fits."""
    bad = min((budget for budget, peak in seen.items() if peak > limit), default=0)
    return sorted((budget, peak) for budget, peak in seen.items() if peak <= limit and (not bad or budget < bad)), bad


def _next_budget(fits: list[tuple[int, int]], bad: int, high: int, limit: int, per_token: float) -> int:
    best, worst = fits[-1]
    slope = 2.0 * per_token  # what the allocator keeps comes on top of tensors
    if len(fits) > 1 and worst > fits[-2][1]:
        slope = (worst - fits[-2][1]) / (best - fits[-2][0])
    guess = best + 0.97 * (limit - worst) / max(slope, 1e-9)
    if bad and not best * 1.005 < guess < bad * 0.995:
        guess = math.sqrt(best * bad)
    return int(min(high, bad - 1 if bad else high, max(best + 1, guess)))


def _too_little(budget: int, peaks: Peaks, limit: int) -> ValueError:
    name = max(peaks, key=peaks.__getitem__)
    return problem(
        "Not even the smallest budget fits",
        got=f"{_mib(peaks[name])} with {budget:,} tokens on a rank ({name} histories)",
        wanted=f"at most {_mib(limit)}",
        where="--max-memory",
        todo="allow more memory, or lower data.max_len, model.dim, the encoder's sizes or the tables (shard them over more ranks)",
    )


def plan_memory(config: RunConfig, world_size: int, text: str) -> dict[str, Any]:
    """Returns the largest token budget of a rank under a limit of memory, and what it takes, from training steps on the device at hand.

    Each budget is tried with three compositions of a full rank: the longest histories of the view, the shortest (most samples), and a
    random draw. See `weigh` for what is measured. One process holds all tables whole; for more ranks what their shards would save is
    given back to the limit, by arithmetic.

    Args:
        config: the run.
        world_size: ranks to find a budget for.
        text: the limit: `0.8` of the GPU's memory (or of the memory that the machine has free), or `2GiB`.

    Raises:
        ValueError: a limit that is none, a view without histories, or a limit that the smallest budget exceeds.
    """
    asked = parse_limit(text)
    subject, alone = open_subject(config, world_size), open_subject(config, 1)
    lengths = subject.lengths
    check_view(lengths)
    saved = int(table_bytes(alone.checked.placements, 1).max() - table_bytes(subject.checked.placements, world_size).max())
    low, high = max(int(lengths.max()), config.data.max_len), max(int(lengths.sum()), config.data.max_len)
    per_token = measure_step(config, alone.checked, lengths, low).activations[0]
    with open_scales(config, asked.of, saved) as scales:
        found = find_budget(scales.weigh, low, min(high, INT32), scales.limit, per_token)
    trials = [(budget, {name: peak - saved for name, peak in peaks.items()}) for budget, peaks in found.trials]
    peaks = {name: peak - saved for name, peak in found.peaks.items()}
    return {
        "limit": asked.text,
        "limit_bytes": scales.limit - saved,
        "device": scales.device,
        "device_bytes": scales.whole,
        "world_size": world_size,
        "saved_by_sharding_bytes": saved,
        "max_tokens": found.max_tokens,
        "peaks_bytes": peaks,
        "worst": max(peaks, key=peaks.__getitem__),
        "too_large": found.too_large,
        "trials": [{"max_tokens": budget, "peaks_bytes": its} for budget, its in trials],
        "config": _line(subject, found.max_tokens),
    }


def _line(subject: Subject, budget: int) -> str:
    """Returns the config line to set. `global_tokens` caps no single rank, so it is lowered by what the fullest rank has above the mean."""
    config = subject.config
    if not config.batching.global_tokens:
        return f"batching: {{max_tokens: {budget}}}"
    total = min(budget * subject.world_size, INT32)
    wanted = replace(config, batching=replace(config.batching, global_tokens=total))
    walk = walk_plan(replace(subject, config=wanted).plan())
    above = max(1.0, int(walk.tokens.max(initial=0)) * subject.world_size / total)
    return f"batching: {{global_tokens: {max(config.data.max_len, int(total / above))}}}"


def describe_memory(numbers: Mapping[str, Any]) -> str:
    """Returns the numbers of `plan_memory` as lines to read."""
    rows = [
        f"  {it['max_tokens']:>12,}" + "".join(f"{_mib(it['peaks_bytes'][c]) if c in it['peaks_bytes'] else '-':>14}" for c in COMPOSITIONS)
        for it in numbers["trials"]
    ]
    saved = numbers["saved_by_sharding_bytes"]
    peaks = ", ".join(f"{name} {_mib(peak)}" for name, peak in numbers["peaks_bytes"].items())
    more = f"{numbers['too_large']:,} is too much" if numbers["too_large"] else "the whole train view fits on one rank"
    lines = [
        f"limit {numbers['limit']} of {numbers['device']}: {_mib(numbers['limit_bytes'])}",
        "  tokens a rank" + "".join(f"{name:>14}" for name in COMPOSITIONS),
        *rows,
        f"largest budget    {numbers['max_tokens']:,} tokens a rank; {more}",
        f"peaks there       {peaks}; {numbers['worst']} histories are the worst",
    ]
    if saved:
        lines.append(
            f"tables            shards of {numbers['world_size']} ranks take {_mib(saved)} less than the whole tables of this process"
        )
    return "\n".join([*lines, f"set               {numbers['config']}"])


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
