"""`distrag plan CONFIG --calibrate`: what a history costs here, by timing training steps, and whether that balances time."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distrag.batching.plan import EpochPlan
from distrag.config import RunConfig
from distrag.problem import problem
from distrag.training.build import build_job
from distrag.training.checks import check_run_dir
from distrag.training.composition import max_over_mean, spread
from distrag.training.cost import FittedCost, cost_settings, write_cost
from distrag.training.nnls import solve_nonnegative
from distrag.training.plan import open_subject
from distrag.training.trial import Trial, take_samples
from distrag.world import open_world

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

QUANTILES = (0.05, 0.35, 0.65, 0.9, 1.0)  # of the lengths of the view: what batches are made of
SHARES = (0.25, 0.5, 1.0)  # of a rank's budget: how full they are
ROUNDS = (3, 15)  # fewest and most times that each is timed
SECONDS = 60.0  # to spend on them, as far as the fewest rounds allow
CHECK_RANKS, CHECK_STEPS, CHECK_SECONDS = 16, 3, 3.0


@dataclass(frozen=True)
class Timed:
    """Batches and the median of their step times.

    Attributes:
        sums: sum of lengths, of squared lengths, samples, and 1, float64 `[n, 4]`.
        seconds: float64 `[n]`.
        rounds: times that each was timed.
    """

    sums: Floats
    seconds: Floats
    rounds: int


def calibrate(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Fits a, b, c of the cost to training steps on the device at hand, writes `cost.json` into the run directory, returns the numbers.

    The seconds of a step are taken as `a * sum L + b * sum L^2 + c * samples + constant`, none of the four negative, fitted by least
    squares of the relative error. The steps are whole ones (forward, backward, update) of this process alone, on batches of histories
    that are all of about one length, of five lengths of the view, a quarter full to full, and on a few that are drawn as training draws
    them. Machines are noisy, so all batches are timed in turn, round after round, and the median of each counts. Then steps are planned for
    several ranks, once by the encoder's arithmetic and once by the fit, and each rank's share is timed here: max / mean of these seconds is
    what a step of so many ranks would lose.

    Args:
        config: the run; nothing of it is written but `cost.json`.
        world_size: ranks to check the balance of; 4 where it is 1. Of more than 16 ranks 16 are timed, the dearest and cheapest among them.

    Raises:
        ValueError: whatever training refuses, or steps whose time does not depend on what they hold.
    """
    ranks = 4 if world_size == 1 else world_size
    subject = open_subject(config, ranks)
    check_run_dir(config.train.run_dir)
    with open_world(config.train.device, timeout_s=config.train.timeout_s) as world:
        trial = Trial(build_job(config, world))
        budget = rank_budget(config, ranks, int(trial.lengths.max()))
        timed = time_batches(trial, choose_batches(trial.lengths, budget, config.batching.max_samples or budget), SECONDS)
        fitted = fit_cost(config, timed, world.device)
        plans = {"arithmetic": subject.checked.cost, "fitted": fitted.cost}
        balance = {name: _check_balance(trial, replace(subject, cost=cost).plan(), fitted) for name, cost in plans.items()}
    path = write_cost(fitted, Path(config.train.run_dir))
    predicted = timed.sums @ np.array([*fitted.cost, fitted.constant_s])
    rows = zip(timed.sums.tolist(), timed.seconds.tolist(), predicted.tolist(), strict=True)
    return {
        "cost": list(fitted.cost),
        "constant_s": fitted.constant_s,
        "error_mean": fitted.error_mean,
        "error_max": fitted.error_max,
        "arithmetic": list(plans["arithmetic"]),
        "device": fitted.device_name,
        "threads": fitted.threads,
        "rounds": timed.rounds,
        "batches": [{"tokens": int(s[0]), "samples": int(s[2]), "measured_s": t, "fitted_s": p} for s, t, p in rows],
        "ranks": ranks,
        "balance": balance,
        "written": str(path),
    }


def rank_budget(config: RunConfig, ranks: int, longest: int) -> int:
    """Returns the tokens of a rank in a step: `max_tokens`, or its share of `global_tokens`, and at least the longest history."""
    batching = config.batching
    tokens = batching.global_tokens // ranks if batching.global_tokens else batching.max_tokens
    return max(longest, tokens or 0)


def choose_batches(lengths: Ints, max_tokens: int, max_samples: int) -> list[Ints]:
    """Returns sample numbers of the batches to time: of about one length each, and drawn at random.

    Args:
        lengths: of the view, some of them above 0.
        max_tokens: of a full batch.
        max_samples: of any batch.
    """
    random = np.random.default_rng(0)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    ordered = lengths[order]
    chosen: dict[tuple[int, int], Ints] = {}
    for length in np.unique(np.quantile(ordered, QUANTILES, method="nearest")).tolist():
        near = order[np.searchsorted(ordered, 0.9 * length) : np.searchsorted(ordered, 1.1 * length, side="right")]
        for share in SHARES:
            count = min(max_samples, max(1, int(share * max_tokens / length)))
            drawn = near[random.permutation(len(near))]
            chosen[length, count] = np.resize(drawn, count)  # repeated where the view has too few of this length
    mixed = [take_samples(lengths, random.permutation(len(lengths)), max_tokens, max_samples) for _ in range(3)]
    return [*chosen.values(), *mixed]


def time_batches(trial: Trial, batches: Sequence[Ints], seconds: float) -> Timed:
    """Returns the median step time of each batch, timed in turn, in as many rounds as `seconds` allow, from 3 to 15."""
    built = [trial.batch(samples) for samples in batches]
    lengths = [trial.lengths[samples].astype(np.float64) for samples in batches]
    sums = np.array([[its.sum(), (its * its).sum(), len(its), 1.0] for its in lengths])
    for batch in built:
        trial.step(batch)  # compiles, and fills caches and pools
    once = sum(trial.seconds(batch) for batch in built)
    rounds = int(np.clip(seconds / max(once, 1e-9), *ROUNDS))
    random = np.random.default_rng(1)
    times = np.zeros((rounds, len(built)))
    for turn in times:
        for i in random.permutation(len(built)).tolist():
            turn[i] = trial.seconds(built[i])
    return Timed(sums, np.median(times, axis=0), rounds)


def fit_cost(config: RunConfig, timed: Timed, device: torch.device) -> FittedCost:
    """Returns the cost whose seconds come closest to those measured.

    Raises:
        ValueError: the seconds do not depend on what a step holds.
    """
    found = solve_nonnegative(timed.sums / timed.seconds[:, None], np.ones(len(timed.seconds)))
    if (timed.sums[:, :3] @ found[:3] < 0.01 * timed.seconds).all():
        raise problem(
            "The time of a step does not depend on what it holds",
            got=f"{len(timed.seconds)} batches of {timed.seconds.min():.2g} to {timed.seconds.max():.2g} s",
            wanted="larger batches that take longer",
            where="batching",
            todo="raise --batching.max_tokens or --batching.global_tokens, or keep the encoder's arithmetic",
        )
    error = np.abs(timed.sums @ found / timed.seconds - 1.0)
    a, b, c, constant = found.tolist()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
    settings, threads = cost_settings(config), torch.get_num_threads()
    return FittedCost((a, b, c), constant, settings, device.type, name, threads, float(error.mean()), float(error.max()))


def _check_balance(trial: Trial, plan: EpochPlan, fitted: FittedCost) -> dict[str, float]:
    """Returns max / mean over ranks, as planned, as the fit predicts it in seconds, and as measured, each a mean over a few steps.

    `noise` is max / mean over as many timings of one and the same share: what `measured` shows where nothing is uneven.
    """
    numbers: dict[str, list[float]] = {"planned": [], "predicted": [], "measured": [], "noise": []}
    for step in spread(plan.num_steps, CHECK_STEPS).tolist():
        order = np.argsort(plan.rank_costs(step), kind="stable")
        ranks = order[spread(plan.world_size, CHECK_RANKS)].tolist()
        shares = [plan.samples(step, rank) for rank in ranks]
        timed = time_batches(trial, shares, CHECK_SECONDS)
        same = time_batches(trial, [shares[-1]] * len(shares), CHECK_SECONDS)
        numbers["planned"].append(plan.imbalance(step))
        numbers["predicted"].append(_imbalance(timed.sums @ np.array([*fitted.cost, fitted.constant_s])))
        numbers["measured"].append(_imbalance(timed.seconds))
        numbers["noise"].append(_imbalance(same.seconds))
    return {name: float(np.mean(values)) for name, values in numbers.items()}


def _imbalance(seconds: Floats) -> float:
    return float(max_over_mean(seconds[None])[0])


def describe_calibration(numbers: Mapping[str, Any]) -> str:
    """Returns the numbers of `calibrate` as lines to read."""
    a, b, c = numbers["cost"]
    rows = [
        f"  {it['samples']:>8,} {it['tokens']:>9,} {it['measured_s'] * 1e3:>11.2f} {it['fitted_s'] * 1e3:>9.2f}"
        for it in numbers["batches"]
    ]
    names, columns = {"arithmetic": "arithmetic", "fitted": "the fit"}, ("planned", "predicted", "measured", "noise")
    checks = [f"  by {names[name]:16}" + "".join(f"{it[column]:>10.4f}" for column in columns) for name, it in numbers["balance"].items()]
    return "\n".join(
        [
            f"{len(rows)} batches, each timed {numbers['rounds']} times, on {numbers['device']}",
            "   samples    tokens measured ms fitted ms",
            *rows,
            f"cost of a history  {a:.4g} L + {b:.4g} L^2 + {c:.4g} seconds, and {numbers['constant_s']:.4g} a step",
            f"in units of a      {_relative(numbers['cost'])}; the encoder's arithmetic says {_relative(numbers['arithmetic'])}",
            f"error of the fit   {numbers['error_mean']:.1%} on average, {numbers['error_max']:.1%} at most",
            f"max / mean of {numbers['ranks']:<6,}" + "".join(f"{column:>10}" for column in columns),
            *checks,
            f"written to {numbers['written']}; `distrag train` with the same run_dir balances by it",
        ]
    )


def _relative(cost: Sequence[float]) -> str:
    unit = cost[0] or 1.0
    return f"L + {cost[1] / unit:.4g} L^2 + {cost[2] / unit:.4g}" if cost[0] else f"{cost[1]:.4g} L^2 + {cost[2]:.4g}"
