"""What a sequence costs: the encoder's arithmetic, or what `distrag plan --calibrate` fitted, or what the config says."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from distrag.config import RunConfig, to_dict
from distrag.data.plain_types import WrongType, convert
from distrag.problem import problem

COST_FILE = "cost.json"

Cost = tuple[float, float, float]


@dataclass(frozen=True)
class FittedCost:
    """A cost that was fitted to the time of training steps.

    Attributes:
        cost: `(a, b, c)` in seconds; a sequence of length L costs `a*L + b*L^2 + c`.
        constant_s: seconds of a step whatever it holds.
        model: the settings that the cost belongs to, from `cost_settings`.
        device: `cpu` or `cuda`.
        device_name: its name.
        threads: of torch, on the CPU.
        error_mean: mean of |fitted - measured| / measured over the timed batches.
        error_max: the largest of these.
    """

    cost: Cost
    constant_s: float
    model: dict[str, Any]
    device: str
    device_name: str
    threads: int
    error_mean: float
    error_max: float


def cost_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that decide what a sequence costs; a fitted cost is of use for the same ones only."""
    plain = to_dict(config)
    names = {"data": ("history", "context", "target"), "model": ("dim", "join", "head_hidden"), "train": ("precision",)}
    parts = {f"{section}.{name}": plain[section][name] for section, its in names.items() for name in its}
    return {"task": plain["task"], **parts, "encoder": plain["encoder"], "loss": plain["loss"]}


def write_cost(fitted: FittedCost, run_dir: Path) -> Path:
    """Writes the fitted cost into a run directory, made if it is not there; returns the file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / COST_FILE
    path.write_text(json.dumps(dataclasses.asdict(fitted), indent=1) + "\n", encoding="utf-8")
    return path


def read_cost(run_dir: str | Path) -> FittedCost | None:
    """Returns the cost that a run directory holds, None where it holds none.

    Raises:
        ValueError: the file is there and is no fitted cost.
    """
    path = Path(run_dir) / COST_FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_cost(path, error) from None
    hints = get_type_hints(FittedCost)
    if not isinstance(found, dict) or set(found) != set(hints):
        raise _no_cost(path, sorted(found) if isinstance(found, dict) else f"{found!r:.80}")
    wrong = []
    for name, value in found.items():
        try:
            found[name] = convert(value, hints[name])
        except WrongType:
            wrong.append(f"{name} {value!r:.80}")
    if wrong:
        raise _no_cost(path, ", ".join(wrong))
    fitted = FittedCost(**found)
    if not all(math.isfinite(value) and value >= 0 for value in fitted.cost) or max(fitted.cost) == 0:
        raise _no_cost(path, fitted.cost)
    return fitted


def _no_cost(path: Path, got: object) -> ValueError:
    todo = "remove the file; `distrag plan CONFIG --calibrate` writes another"
    return problem("The fitted cost cannot be read", got=got, wanted="three numbers >= 0 under `cost`, not all 0", where=path, todo=todo)


def choose_cost(config: RunConfig, arithmetic: Cost, fitted: FittedCost | None, device: str) -> tuple[Cost, str]:
    """Returns the cost that a run balances by, and a few words on where it comes from.

    `batching.cost` comes first, then a cost that was fitted for this model on this kind of device, then the encoder's arithmetic.
    Every rank has to be given the same `fitted`, read by one of them: the plan depends on it.

    Args:
        config: the run.
        arithmetic: of the encoder.
        fitted: from `read_cost`.
        device: `cpu` or `cuda`; `auto` where it is not known yet.
    """
    if config.batching.cost is not None:
        return config.batching.cost, "batching.cost"
    words = "the encoder's arithmetic"
    if fitted is None:
        return arithmetic, words
    if fitted.model != cost_settings(config):
        return arithmetic, f"{words}; {COST_FILE} was fitted for another model: run `distrag plan --calibrate` again"
    if device not in ("auto", fitted.device):
        return arithmetic, f"{words}; {COST_FILE} was fitted on {fitted.device}: run `distrag plan --calibrate` on {device}"
    return fitted.cost, f"fitted on {fitted.device_name}, error {fitted.error_mean:.1%}"


def keep_cost(moved: Path, run_dir: Path) -> None:
    """Copies the fitted cost out of an earlier run that was moved aside into the folder of the new one."""
    if (moved / COST_FILE).is_file():
        shutil.copyfile(moved / COST_FILE, run_dir / COST_FILE)
