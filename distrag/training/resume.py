"""Where a cut run goes on: what its last checkpoint says, what may not have changed since, and what was written beyond it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distrag.batching.checks import check_state as check_sampler
from distrag.checkpoint import Checkpoints, Found, Match, find_checkpoint, find_newest, has_checkpoint, match_checkpoint, read_extra
from distrag.config import RunConfig, to_dict
from distrag.data.text_file import parse_json, read_small
from distrag.embedding.config import TablesConfig
from distrag.embedding.plan import Placement
from distrag.problem import problem
from distrag.training.build import Job
from distrag.training.contract import SCHEMA, VOCABULARIES
from distrag.training.metrics import SAMPLES, keep_lines
from distrag.training.optim import build_optimizer
from distrag.world import World

FORMAT = 2
_LIMITS = ("train.num_epochs", "train.max_steps")
_MAY_DIFFER = (
    "batching.",  # another plan: the rest of the epoch is dealt anew
    "data.cache",
    "data.path",  # the hash says whether it is the same store
    "data.on_unknown",
    "debug",
    "tables.cpu_kernel",
    "tables.max_gib_per_rank",
    "tables.per_table",
    "tables.shard_rows",
    "tables.sharding",
    "train.async_save",
    "train.device",
    "train.eval_every",
    "train.keep",
    "train.log_every",
    "train.log_samples",
    "train.max_bad_steps",
    *_LIMITS,
    "train.patience",
    "train.pipeline",
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
    **dict.fromkeys(("settings", "sampler", "best_valid", "tables", "lines", "guard"), dict),
    **dict.fromkeys(("limits", "world"), list),
    "evaluated_at": int,
    "best_epochs": (int, float),
    "best": (int, float, type(None)),
    "before": (dict, type(None)),
    "seconds": (int, float),
}


def checkpoints_of(run_dir: Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def build_checkpoints(config: RunConfig, run_dir: Path, world: World) -> Checkpoints:
    """Returns what saves the checkpoints of a run. A collective: every rank calls it."""
    contract = [run_dir / name for name in ("config.yaml", SCHEMA, VOCABULARIES)]
    train = config.train
    return Checkpoints(checkpoints_of(run_dir), world, keep=train.keep, background=train.async_save, contract=contract)


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


def describe_tables(placements: Sequence[Placement], tables: TablesConfig) -> dict[str, list[str]]:
    """Returns sharding and optimizer of each table."""
    kinds = {True: tables.replicated_optimizer, False: tables.optimizer}
    return {placement.table: [placement.sharding, kinds[placement.sharding == "replicated"]] for placement in placements}


def find_state(job: Job, run_dir: Path) -> tuple[Found | None, dict[str, Any] | None]:
    """Returns the checkpoint that the run in a folder goes on from and its state, with the run's `result` where it has one.

    A collective: every rank calls it. What was passed over is printed.

    Raises:
        ValueError: no checkpoint is whole, or the state is none; the same on every rank, before anything changes.
    """
    found = find_newest(checkpoints_of(run_dir), job.world)
    if found is None:
        return None, None

    def read() -> dict[str, Any]:
        for told in found.skipped:
            print(f"{run_dir}: skipped {told}", flush=True)
        if found.skipped:
            print(f"{run_dir}: goes on from {found.path.name}, the newest whole checkpoint", flush=True)
        _check_shape(found.state, found.path)
        return {**found.state, "result": _read_result(run_dir / "result.json")}

    return found, job.world.broadcast_object(job.world.on_first(read))


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
    if isinstance(state, Mapping) and state.get("format") != FORMAT:
        todo = "go on with the version of distrag that wrote it, or start anew with another --train.run_dir"
        raise problem("A checkpoint of another format", got=state.get("format"), wanted=FORMAT, where=where, todo=todo)
    wrong = [key for key, kinds in _SHAPE.items() if not isinstance(state, Mapping) or not isinstance(state.get(key), kinds)]
    wrong += [key for key in _COUNTS if key not in wrong and (isinstance(state[key], bool) or state[key] < 0)]
    wrong += ["before"] if not wrong and state["phase"] == "refit" and not state["before"] else []
    if wrong:
        todo = "put the file back as it was, or start anew with another --train.run_dir"
        raise problem(
            "Not the state of a run", got=f"{', '.join(wrong)} missing or wrong", wanted="what a run saved", where=where, todo=todo
        )
    check_sampler(state["sampler"])


def check_state(state: Mapping[str, Any], job: Job) -> None:
    """Refuses to go on where the run would not be the same run.

    Raises:
        ValueError: another store (both hashes are named), or settings that may not change (all are named).
    """
    where = checkpoints_of(Path(job.config.train.run_dir))
    if state["store_hash"] != job.store.content_hash:
        todo = "give --data.path of the store that the run was trained on, or start anew with another --train.run_dir"
        got, wanted = f"{job.store.path} with hash {job.store.content_hash}", f"hash {state['store_hash']}"
        raise problem("The store is not the one of the run", got=got, wanted=wanted, where=where, todo=todo)
    now, theirs = dict(describe_run(job.config, job.store.content_hash)["settings"]), dict(state["settings"])
    if state["phase"] == "refit":  # how long the refit takes was settled when valid had chosen
        now |= zip(_LIMITS, limits_of(job.config), strict=True)
        theirs |= zip(_LIMITS, state["limits"], strict=True)
    if "stochastic" not in (now["data.truncate"], theirs.get("data.truncate")):
        now.pop("data.mean_cost_share")  # without effect
    if not job.config.train.refit:
        now.pop("train.init")  # only a refit starts from there once more
    differ = [key for key, value in now.items() if key in theirs and theirs[key] != value]
    if differ:
        got, wanted = (", ".join(f"{key} {of[key]}" for key in differ) for of in (now, theirs))
        todo = "resume with these settings as they were, or start another run (--train.run_dir) from its weights (--train.init)"
        raise problem("The config is not the one of the run", got=got, wanted=wanted, where=where, todo=todo)


def is_finished(state: Mapping[str, Any], config: RunConfig) -> bool:
    """Returns whether the run of `state` has its result, and the config asks for no more steps than it trained."""
    train, done = config.train, (state["step"], state["epochs_done"], state["misses"])
    limits = zip((train.max_steps, train.num_epochs, train.patience), done, strict=True)
    return state["result"] is not None and (state["phase"] == "refit" or any(0 < limit <= reached for limit, reached in limits))


def check_tensors(found: Found, state: Mapping[str, Any], job: Job) -> list[str]:
    """Refuses a checkpoint whose tensors do not fit; returns what was saved in another layout. A collective: every rank calls it.

    Raises:
        ValueError: with the list of all parameters and states that differ; the same on every rank.
    """
    optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
    fits = match_checkpoint(found, job.parallel, optimizer, job.world, "resume with the config as it was, or start another run")
    size, now = job.world.size, describe_tables(job.placements, job.config.tables)
    ranks = [f"saved by {state['world'][0]} rank(s), goes on with {size}"] if state["world"][0] != size else []
    lines = (_describe_change(name, state["tables"].get(name), now[name], fits) for name in sorted(now))
    return [*ranks, *filter(None, lines)]


def _describe_change(table: str, before: Sequence[str] | None, now: Sequence[str], fits: Match) -> str:
    """Returns one line of a table that was kept otherwise, '' of one that was not."""
    if before is None or before[0] == now[0]:
        return ""
    rate = "optim.lr" if now[0] == "replicated" else "optim.table_lr"
    rates = f"; its rate is {rate} now" if "replicated" in (before[0], now[0]) else ""
    if f"tables.{table}" in {name.removesuffix(".weight") for name in fits.anew}:
        carried = f"weights carried over; {now[1]} starts anew, since the state of {before[1]} means nothing to it"
    else:
        carried = "weights and optimizer state carried over"
    return f"table {table} resharded: {before[0]} -> {now[0]}, {carried}{rates}"


def is_kept(path: Path, step: int, world: World) -> bool:
    """Returns whether a kept checkpoint is whole and of this step. A collective: every rank calls it."""
    if not world.broadcast_object(world.on_first(lambda: has_checkpoint(path) and _step_of(path) == step)):
        return False
    try:
        find_checkpoint(path, world)
    except ValueError:
        return False
    return True


def _step_of(path: Path) -> Any:
    try:
        return read_extra(path).get("step")
    except ValueError:
        return None


def drop_beyond(run_dir: Path, state: Mapping[str, Any]) -> list[str]:
    """Drops the lines of metrics and samples that a cut run wrote after its last checkpoint, and a result that is to be replaced.

    Returns:
        What is missing of the lines up to the checkpoint, one sentence each.
    """

    refitted = [False]

    def keep(line: dict[str, Any]) -> bool:
        kind, step = line["kind"], line["step"]
        refitted[0] = refitted[0] or kind == "refit"
        if state["phase"] == "refit":
            of_refit = kind == "refit" or (kind in ("skipped", "stop") and refitted[0])
            known = ("train", "valid", "resume", "stop", "skipped", "refit")
            return kind in known and (not of_refit or step <= state["step"])
        last = {**dict.fromkeys(("train", "resume", "stop", "skipped"), state["step"]), "valid": state["evaluated_at"]}
        return bool(step <= last.get(kind, -1))

    kept = keep_lines(run_dir / "metrics.jsonl", keep)
    kept["samples"] = sum(keep_lines(path, keep).total() for path in sorted((run_dir / SAMPLES).glob("rank-*.jsonl")))
    (run_dir / "result.json").unlink(missing_ok=True)
    files = {"train": "metrics.jsonl", "refit": "metrics.jsonl", "samples": SAMPLES}
    return [
        f"{files[kind]} holds {kept[kind]} of the {count} {kind} lines that the run had written: somebody emptied it"
        for kind, count in state["lines"].items()
        if kind in files and kept[kind] < count
    ]


def read_losses(run_dir: Path, phase: str) -> list[float]:
    """Returns the loss of each logged step of a phase, in order; steps that were skipped have none."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    losses, skipped = [], -1
    for line in lines:
        skipped = line["step"] if line["kind"] == "skipped" else skipped  # comes before the line of the same step
        if line["kind"] == phase and line["loss"] is not None and line["step"] != skipped:
            losses.append(line["loss"])
    return losses
