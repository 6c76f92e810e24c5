"""Where a cut run goes on: what its last checkpoint says, what may not have changed since, and what was written beyond it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distrag.batching.checks import check_state as check_sampler
from distrag.checkpoint import has_checkpoint, read_extra
from distrag.config import RunConfig, to_dict
from distrag.data.text_file import parse_json, read_small
from distrag.problem import problem
from distrag.training.build import Job
from distrag.training.metrics import SAMPLES, keep_lines

FORMAT = 1
_LIMITS = ("train.num_epochs", "train.max_steps")
_MAY_DIFFER = (
    "batching.",  # another plan: the rest of the epoch is dealt anew
    "data.cache",
    "data.path",  # the hash says whether it is the same store
    "data.on_unknown",
    "debug",
    "tables.cpu_kernel",
    "tables.max_gib_per_rank",
    "train.device",
    "train.eval_every",
    "train.log_every",
    "train.log_samples",
    *_LIMITS,
    "train.patience",
    "train.resume",
    "train.run_dir",
    "train.save_every",
    "train.tensorboard",
    "train.timeout_s",
)


_COUNTS = ("step", "num_steps", "num_epochs", "best_step", "misses", "epochs_done", "epoch_steps", "schedule_steps")
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, (int, float)),
    **dict.fromkeys(("store_hash", "phase", "metric"), str),
    **dict.fromkeys(("settings", "sampler", "best_valid"), dict),
    **dict.fromkeys(("limits", "losses", "world"), list),
    "evaluated_at": int,
    "seconds": (int, float),
}


def last_of(run_dir: Path) -> Path:
    """Returns the folder of the checkpoint that a run goes on from."""
    return run_dir / "checkpoints" / "last"


def describe_run(config: RunConfig, store_hash: str) -> dict[str, Any]:
    """Returns what a checkpoint says of the run it belongs to: the store's hash, and the settings that may not change."""
    return {
        "format": FORMAT,
        "store_hash": store_hash,
        "settings": {key: value for key, value in _dotted(to_dict(config)) if not key.startswith(_MAY_DIFFER)},
        "limits": limits_of(config),
    }


def limits_of(config: RunConfig) -> list[int]:
    """Returns how long a config trains: epochs and steps, 0 where it sets no limit."""
    return [config.train.num_epochs, config.train.max_steps]


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """Returns the state of the last whole checkpoint, with the run's `result` where it has one; None without a checkpoint."""
    if not has_checkpoint(last_of(run_dir)):
        return None
    state, result = read_extra(last_of(run_dir)), run_dir / "result.json"
    _check_shape(state, last_of(run_dir))
    return {**state, "result": _read_result(result)}


def _read_result(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    todo = "remove it; the run then goes on from its last checkpoint and tests again"
    result = parse_json(read_small(path, what="The result", todo=todo), path, what="The result", todo=todo)
    if not isinstance(result, dict):
        raise problem("A result cannot be read", got="no JSON object", wanted="what the run wrote", where=path, todo=todo)
    return result


def _check_shape(state: Any, where: Path) -> None:
    """Refuses a state that no run has saved, before anything is built on it."""
    wrong = [key for key, kinds in _SHAPE.items() if not isinstance(state, dict) or not isinstance(state.get(key), kinds)]
    wrong += [key for key in _COUNTS if key not in wrong and (isinstance(state[key], bool) or state[key] < 0)]
    if wrong:
        todo = "put the file back as it was, or start anew with another --train.run_dir"
        raise problem(
            "Not the state of a run", got=f"{', '.join(wrong)} missing or wrong", wanted="what a run saved", where=where, todo=todo
        )
    check_sampler(state["sampler"])


def check_state(state: Mapping[str, Any], job: Job) -> None:
    """Refuses to go on where the run would not be the same run.

    Raises:
        ValueError: another format, another store (both hashes are named), or settings that may not change (all are named).
    """
    where = last_of(Path(job.config.train.run_dir))
    if state.get("format") != FORMAT:
        todo = "go on with the version of distrag that wrote it, or start anew with another --train.run_dir"
        raise problem("A checkpoint of another format", got=state.get("format"), wanted=FORMAT, where=where, todo=todo)
    if state["store_hash"] != job.store.content_hash:
        todo = "give --data.path of the store that the run was trained on, or start anew with another --train.run_dir"
        got, wanted = f"{job.store.path} with hash {job.store.content_hash}", f"hash {state['store_hash']}"
        raise problem("The store is not the one of the run", got=got, wanted=wanted, where=where, todo=todo)
    now, theirs = dict(describe_run(job.config, job.store.content_hash)["settings"]), dict(state["settings"])
    if state["phase"] == "refit":  # how long the refit takes was settled when valid had chosen
        now |= zip(_LIMITS, limits_of(job.config), strict=True)
        theirs |= zip(_LIMITS, state["limits"], strict=True)
    differ = [key for key, value in now.items() if key in theirs and theirs[key] != value]
    if differ:
        got, wanted = (", ".join(f"{key} {of[key]}" for key in differ) for of in (now, theirs))
        todo = "resume with these settings as they were, or start anew with another --train.run_dir"
        raise problem("The config is not the one of the run", got=got, wanted=wanted, where=where, todo=todo)


def is_finished(state: Mapping[str, Any], config: RunConfig) -> bool:
    """Returns whether the run of `state` has its result, and the config asks for no more steps than it trained."""
    train, done = config.train, (state["step"], state["epochs_done"], state["misses"])
    limits = zip((train.max_steps, train.num_epochs, train.patience), done, strict=True)
    return state["result"] is not None and (state["phase"] == "refit" or any(0 < limit <= reached for limit, reached in limits))


def drop_beyond(run_dir: Path, state: Mapping[str, Any]) -> None:
    """Drops the lines of metrics and samples that a cut run wrote after its last checkpoint, and a result that is to be replaced."""

    def keep(line: dict[str, Any]) -> bool:
        kind, step = line["kind"], line["step"]
        if state["phase"] == "refit":
            return kind in ("train", "valid", "resume") or (kind == "refit" and step <= state["step"])
        last = {"train": state["step"], "resume": state["step"], "valid": state["evaluated_at"]}
        return bool(step <= last.get(kind, -1))

    keep_lines(run_dir / "metrics.jsonl", keep)
    for path in sorted((run_dir / SAMPLES).glob("rank-*.jsonl")):
        keep_lines(path, keep)
    (run_dir / "result.json").unlink(missing_ok=True)
