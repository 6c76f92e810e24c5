"""What the values of a config may be: one table of choices, one of ranges, and the few rules that join two keys."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from sys import float_info
from typing import Any, NamedTuple

from distrag.config.sections import RunConfig
from distrag.data.remote import is_url
from distrag.data.windows import POLICIES
from distrag.embedding.config import SHARDINGS, TABLE_OPTIMIZERS
from distrag.problem import problem

RANKING_METRICS = ("hr", "ndcg", "mrr")
BINARY_METRICS = ("auc", "gauc", "gauc_mean", "log_loss", "ne")
"""Metrics of which more (or, of the last two, less) is better; counts and means are not to be watched."""


class Range(NamedTuple):
    """Numbers from `low` to `high`; an open end does not belong to them."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low, high = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        return f"{'above' if self.open_low else 'at least'} {low} and {'below' if self.open_high else 'at most'} {high}"


INT32 = 2**31 - 1
"""Sizes and counts stay below it: libraries take many of them as 32-bit integers."""

_ANY = Range(-INT32, INT32)
_CHOICES: dict[str, tuple[str, ...]] = {
    "task": ("next_item", "conversion"),
    "batching.locality": ("global", "node"),
    "data.truncate": POLICIES,
    "model.join": ("concat", "sum"),
    "optim.name": ("adam", "adamw"),
    "optim.schedule": ("constant", "cosine"),
    "train.precision": ("fp32", "bf16", "fp16"),
    "train.device": ("auto", "cpu", "cuda"),
    "tables.sharding": SHARDINGS,
    "tables.optimizer": TABLE_OPTIMIZERS,
    "tables.replicated_optimizer": ("adam", "adagrad", "sgd"),
    "tables.cpu_kernel": ("numba", "fbgemm"),
}
# Upper ends are far above what is of use and below what overflows or fills a machine.
_RANGES: dict[str, Range] = {
    "data.max_len": Range(1, 1_000_000),
    "data.mean_cost_share": Range(0, 1, open_low=True),
    "data.split.valid_share": Range(0, 1),
    "data.split.test_share": Range(0, 1),
    "data.split.seed": Range(0, INT32),
    "data.split.time_valid": Range(-(2**62), 2**62),
    "data.split.time_test": Range(-(2**62), 2**62),
    "batching.max_tokens": Range(1, INT32),
    "batching.global_tokens": Range(1, INT32),
    "batching.max_samples": Range(1, INT32),
    "batching.bucket_steps": Range(1, 1_000_000),
    "batching.cost": Range(0, 1e12),
    "batching.prefetch": Range(0, 1024),
    "batching.micro_batches": Range(1, 65_536),
    "model.dim": Range(1, 65_536),
    "model.head_hidden": Range(1, 65_536),
    "encoder.num_layers": Range(1, 256),
    "encoder.num_heads": Range(1, 65_536),
    "encoder.dropout": Range(0, 1, open_high=True),
    "encoder.ffn_factor": Range(0, 256, open_low=True),
    "loss.num_negatives": Range(1, 10_000_000),
    "loss.temperature": Range(1e-6, 1e6),
    "loss.chunk_logits": Range(1, INT32),
    "tables.shard_rows": Range(0, 2**53),
    "tables.init_std": Range(0, 1e6),
    "tables.eps": Range(0, 1e6),
    "tables.max_gib_per_rank": Range(0, 1e6),
    "optim.lr": Range(0, 1e6, open_low=True),
    "optim.table_lr": Range(0, 1e6),
    "optim.weight_decay": Range(0, 1e6),
    "optim.betas": Range(0, 1, open_high=True),
    "optim.eps": Range(0, 1e6),
    "optim.warmup_steps": Range(0, INT32),
    "optim.min_lr_share": Range(0, 1),
    "optim.clip_norm": Range(0, 1e12),
    "train.loss_scale": Range(2**-14, 2**24),
    "train.max_bad_steps": Range(1, INT32),
    "train.num_epochs": Range(0, INT32),
    "train.max_steps": Range(0, INT32),
    "train.log_every": Range(1, INT32),
    "train.eval_every": Range(0, INT32),
    "train.eval_ks": Range(1, INT32),
    "train.patience": Range(0, INT32),
    "train.seed": Range(0, INT32),
    "train.save_every": Range(0, INT32),
    "train.keep": Range(1, 1_000_000),
    "train.timeout_s": Range(0, 1e7, open_low=True),
}
_PATHS = ("data.path", "data.cache", "train.run_dir", "train.init")


def check_config(config: RunConfig, *, writes: bool = True) -> RunConfig:
    """Returns the config when its values make sense, each alone and together.

    Args:
        config: the run.
        writes: whether its folders will be written to, and are therefore to be its own.

    Raises:
        ValueError: naming the key, its value and what it may be.
    """
    for key, kind, value in _leaves(config):
        if value is None and "None" not in kind:
            raise problem("A value is missing", got="null", wanted=kind, where=key, todo=f"set --{key}, or leave the key out")
        for part in _parts(value):
            _check_value(key, part)
    for key, allowed in _CHOICES.items():
        if _get(config, key) not in allowed:
            raise problem("A choice that does not exist", got=_get(config, key), wanted=allowed, where=key, todo=f"choose one for --{key}")
    check_ks(config.train.eval_ks, "train.eval_ks")
    _check_budget(config)
    _check_locality(config)
    _check_features(config)
    _check_metric(config)
    if writes:
        _check_places(config)
    return config


def check_number(value: float, allowed: Range, where: str) -> None:
    """Refuses a number outside its range, NaN, infinity and what counts as 0 in training (subnormal numbers are flushed) included.

    Raises:
        ValueError: naming the key, its value and the range.
    """
    if value not in allowed or 0 < abs(value) < float_info.min:  # NaN is in none
        got = "a number of many digits" if isinstance(value, int) and abs(value) > 10**40 else value
        raise problem("A number out of range", got=got, wanted=allowed, where=where, todo=f"set {where} to a number in this range")


def check_ks(ks: Sequence[int], where: str) -> None:
    """Refuses cut-offs that rank nothing.

    Raises:
        ValueError: there is none, or one below 1.
    """
    if not ks:
        raise problem("No cut-off", got="an empty list", wanted="such as 5, 10, 20", where=where, todo=f"set {where}")
    for k in ks:
        check_number(k, _RANGES["train.eval_ks"], where)


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields dotted key, type as written, and value of every setting."""
    for entry in dataclasses.fields(section):
        value, key = getattr(section, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, str(entry.type), value


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(key, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(value, _RANGES.get(key, _ANY), key)


def _check_text(key: str, value: str) -> None:
    """Refuses what no file system and no YAML file takes, before it fails there."""
    printable = value.replace("\t", " ").isprintable()
    parts = PurePath(value).parts if key in _PATHS else (value,)
    if not printable or max((len(part.encode(errors="replace")) for part in parts), default=0) > 255 or len(value) > 4000:
        got = ascii(value if len(value) < 80 else value[:76] + "...")
        raise problem(
            "A text that no name can be", got=got, wanted="printable characters, at most 255 bytes a name", where=key, todo=f"set --{key}"
        )


def _check_places(config: RunConfig) -> None:
    """Refuses folders that a run writes to and that are none of its own: a run is moved aside, whole, when another one begins there."""
    run_dir, cache = config.train.run_dir, config.data.cache
    if not run_dir.strip():
        raise problem("No run directory", got="an empty path", wanted="a folder", where="train.run_dir", todo="set --train.run_dir")
    for key, path in (("train.run_dir", run_dir), ("data.cache", cache)):
        if path is not None and (is_url(path) or not path.strip()):
            todo = f"set --{key} to a folder"
            raise problem("A folder of this machine is needed", got=path, wanted="a path without ://", where=key, todo=todo)
    if cache is not None and os.path.dirname(os.path.realpath(cache)) == os.path.realpath(cache):
        todo = "set --data.cache to a folder of its own, such as data/cache"
        raise problem("The cache has no folder of its own", got=cache, wanted="a folder", where="data.cache", todo=todo)
    run, here = os.path.realpath(run_dir), os.path.realpath(".")
    store = os.path.realpath(config.data.path) if config.data.path and not is_url(config.data.path) else ""
    for name, other in (("the folder that distrag was started in", here), ("the store", store)):
        if other == run or other.startswith(run.rstrip("/") + "/"):
            todo = "set --train.run_dir to a folder of its own, such as runs/mine"
            got = f"{run_dir}, which is or holds {name}"
            raise problem("The run directory is not free", got=got, wanted="a folder of its own", where="train.run_dir", todo=todo)
    if store and run.startswith(store.rstrip("/") + "/"):
        todo = "set --train.run_dir to a folder outside the store"
        raise problem("The run directory lies in the store", got=run_dir, wanted="another folder", where="train.run_dir", todo=todo)


def _check_budget(config: RunConfig) -> None:
    batching = config.batching
    budget = batching.global_tokens or batching.max_tokens
    if budget is None:
        todo = "set --batching.global_tokens or --batching.max_tokens"
        raise problem("No token budget", got="null", wanted="max_tokens or global_tokens", where="batching", todo=todo)
    if budget < config.data.max_len:
        where = "batching.global_tokens" if batching.global_tokens else "batching.max_tokens"
        todo = f"raise --{where} or lower --data.max_len, so that every sequence fits"
        raise problem(
            "The token budget is smaller than one sequence", got=budget, wanted=f"at least {config.data.max_len}", where=where, todo=todo
        )


def _check_locality(config: RunConfig) -> None:
    if config.batching.locality == "global":
        return
    if config.batching.global_tokens:
        todo = "set --batching.max_tokens and --batching.global_tokens=null, or --batching.locality=global"
        got = f"global_tokens {config.batching.global_tokens} with locality node"
        wanted = "max_tokens: which samples form a step depends on the nodes"
        raise problem("Steps cannot be the same for every number of nodes", got=got, wanted=wanted, where="batching", todo=todo)
    if config.data.split.kind == "time":
        todo = "set --data.split.kind to leave_one_out or row, or --batching.locality=global"
        wanted = "a split by row numbers and lengths alone: a node reads no times of other nodes' rows"
        raise problem("The split would read every row", got="time with locality node", wanted=wanted, where="data.split.kind", todo=todo)


def _check_features(config: RunConfig) -> None:
    history, context = config.data.history or [], config.data.context or []
    for where, names in (("data.history", history), ("data.context", context), ("data.history and data.context", [*history, *context])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise problem("A feature is named twice", got=twice, wanted="each once", where=where, todo="leave one of them out")


def _check_metric(config: RunConfig) -> None:
    names = list(BINARY_METRICS)
    if config.task == "next_item":
        names = [f"{name}@{k}" for k in config.train.eval_ks for name in RANKING_METRICS]
    if config.train.metric and config.train.metric not in names:
        todo = "name one of these" + (", or add its k to --train.eval_ks" if config.task == "next_item" else "")
        raise problem("No such metric to select by", got=config.train.metric, wanted=names, where="train.metric", todo=todo)


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
