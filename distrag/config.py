"""The run's config: the rooms' sections, nested; defaults < YAML < command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from distrag.batching.config import BatchingConfig
from distrag.data.config import DataConfig
from distrag.embedding.config import TablesConfig
from distrag.encoder import ENCODERS
from distrag.loss import LOSSES
from distrag.model import ModelConfig
from distrag.problem import problem


@dataclass(frozen=True)
class OptimConfig:
    """Optimizers, their rates and schedule.

    Args:
        name: of the dense part: adam or adamw.
        lr: learning rate of the dense part and of replicated tables.
        table_lr: learning rate of sharded tables.
        weight_decay: of the dense matrices; never of tables, norms and biases.
        betas: decay rates of the Adam moments.
        eps: of Adam.
        warmup_steps: steps over which all rates rise linearly.
        schedule: constant, or cosine (falls to min_lr_share of the rate at the last step).
        min_lr_share: share of the rate that cosine ends at.
        clip_norm: largest global norm of the dense gradient; 0 does not clip.
    """

    name: str = "adam"
    lr: float = 1e-3
    table_lr: float = 0.05
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr_share: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, when to evaluate, where to write.

    Args:
        run_dir: folder of the run: config, metrics, checkpoints, result.
        num_epochs: epochs to train; 0 asks for max_steps.
        max_steps: global steps to train; 0 asks for num_epochs.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between evaluations; 0 evaluates at the end of each epoch.
        eval_ks: cut-offs of HR, NDCG and MRR.
        metric: what early stopping and the best checkpoint watch; empty means ndcg@10 (next_item) or auc (conversion).
        patience: evaluations without improvement before training stops; 0 never stops early.
        refit: once valid has chosen the best step, train afresh for as many epochs on train and valid together, then test.
        seed: of everything random.
        precision: fp32 or bf16 (dense part under autocast; tables and loss stay float32).
        device: auto, cpu or cuda.
        timeout_s: how long a collective may wait for another rank, in seconds.
        tensorboard: write TensorBoard events.
    """

    run_dir: str = "runs/run"
    num_epochs: int = 0
    max_steps: int = 0
    log_every: int = 50
    eval_every: int = 0
    eval_ks: tuple[int, ...] = (5, 10, 20)
    metric: str = ""
    patience: int = 0
    refit: bool = False
    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    timeout_s: float = 300.0
    tensorboard: bool = True


def _section(title: str, table: Mapping[str, Any]) -> type[Any]:
    """Returns one dataclass with every field that any class of `table` has; None means that class's own default."""
    fields: dict[str, Any] = {}
    docs: dict[str, list[str]] = {}
    for name, kind in table.items():
        for entry in dataclasses.fields(kind.Config):
            fields[entry.name] = (entry.name, f"{entry.type} | None", None)
            docs.setdefault(entry.name, []).append(name)
    lines = [f"        {key}: of {', '.join(names)}." for key, names in docs.items()]
    made = dataclasses.make_dataclass(f"{title}Config", [("name", str, ""), *fields.values()], frozen=True)
    made.__doc__ = f"The {title.lower()} and its settings.\n\nArgs:\n        name: one of {', '.join(table)}.\n" + "\n".join(lines)
    return made


EncoderSection = _section("Encoder", ENCODERS)
LossSection = _section("Loss", LOSSES)


@dataclass(frozen=True)
class RunConfig:
    """One run of distrag.

    Args:
        task: next_item (every position predicts the next) or conversion (history and context predict a label).
        data: the store, its split and features.
        batching: token budget and buckets.
        model: width and join.
        encoder: name and settings of the encoder.
        loss: name and settings of the loss; empty name means sampled_softmax (next_item) or binary (conversion).
        tables: sharding and table optimizers.
        optim: learning rates and schedule.
        train: length, evaluation, run directory.
        debug: one process, every check on, no threads.
    """

    task: str = "next_item"
    data: DataConfig = field(default_factory=DataConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    encoder: EncoderSection = field(default_factory=lambda: EncoderSection(name="sasrec"))  # type: ignore[valid-type]
    loss: LossSection = field(default_factory=LossSection)  # type: ignore[valid-type]
    tables: TablesConfig = field(default_factory=TablesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    debug: bool = False


def build_parser(prog: str = "distrag train") -> ArgumentParser:
    """Returns the parser whose `--help` is made from the docstrings of the sections."""
    parser = ArgumentParser(prog=prog, description="Trains, evaluates and writes a run directory.", exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of these keys")
    parser.add_class_arguments(RunConfig)
    return parser


def known_keys() -> list[str]:
    """Returns every dotted key of the config."""
    return [key for key in _dotted(to_dict(RunConfig())) if key]


def read_config(args: Sequence[str] | Mapping[str, Any] | RunConfig) -> RunConfig:
    """Returns the config out of command-line words, or of a nested mapping.

    Args:
        args: words such as `["--config", "c.yaml", "--optim.lr=0.01"]`, or a mapping as YAML would give it.

    Raises:
        ValueError: an unknown key (the nearest known one is named) or a value of the wrong type.
    """
    if isinstance(args, RunConfig):
        return args
    parser = build_parser()
    if isinstance(args, Mapping):
        check_keys(_dotted(args), "the config mapping")
        parsed = _parse(parser, lambda: parser.parse_object(dict(args)))
    else:
        words = [str(word) for word in args]
        _check_words(words)
        parsed = _parse(parser, lambda: parser.parse_args(words))
    made = parser.instantiate(parsed)
    config: RunConfig = RunConfig(**{f.name: made[f.name] for f in dataclasses.fields(RunConfig)})
    return check_config(config)


def _parse(parser: ArgumentParser, parse: Any) -> Namespace:
    try:
        return parse()  # type: ignore[no-any-return]
    except (TypeError, KeyError, Exception) as error:
        if isinstance(error, ValueError):
            raise
        todo = "mend the value; `distrag train --help` lists every key with its type"
        raise problem(
            "The config cannot be read", got=str(error).strip(), wanted="values of the documented types", where="config", todo=todo
        ) from None


def _check_words(words: Sequence[str]) -> None:
    keys = [word[2:].split("=")[0] for word in words if word.startswith("--")]
    check_keys([key for key in keys if key not in ("config", "help", "print_config")], "the command line")
    for i, word in enumerate(words):
        path = (
            word.split("=", 1)[1] if word.startswith("--config=") else words[i + 1] if word == "--config" and i + 1 < len(words) else None
        )
        if path is not None:
            check_keys(_dotted(read_yaml(path)), path)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        ValueError: no such file, or not a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise problem(
            "The config file cannot be read", got=error, wanted="a YAML file", where=path, todo="mend the path or the file"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise problem(
            "The config file is no mapping", got=type(content).__name__, wanted="section: {key: value}", where=path, todo="see configs/"
        )
    return content


def check_keys(keys: Sequence[str], where: str) -> None:
    """Refuses a key that does not exist, naming the nearest one that does.

    Raises:
        ValueError: for the first unknown key.
    """
    known = known_keys()
    sections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    for key in keys:
        if key in known or key in sections or any(key.startswith(f"{open_key}.") for open_key in ("tables.per_table",)):
            continue
        near = _nearest(key, [*known, *sections])
        wanted = f"did you mean {near!r}?" if near else f"a key of {sorted(sections)}"
        raise problem(
            "An unknown config key", got=key, wanted=wanted, where=where, todo="correct the key; `distrag train --help` lists them all"
        )


def _nearest(key: str, names: Sequence[str]) -> str:
    """Returns the name most like `key`, as a whole or in its last word; '' when none is."""

    def likeness(name: str) -> float:
        ends = (key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1])
        return max(difflib.SequenceMatcher(None, key, name).ratio(), 0.99 * difflib.SequenceMatcher(None, *ends).ratio())

    best = max(names, key=likeness)
    return best if likeness(best) >= 0.5 else ""


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    out: list[str] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out += _dotted(value, f"{prefix}{key}.")
        else:
            out.append(f"{prefix}{key}")
    return out


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the config as nested plain values, as YAML holds it; settings left to their default are left out of encoder and loss."""
    plain = dataclasses.asdict(config)
    return {key: _plain(value) for key, value in plain.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_CHOICES: dict[str, tuple[str, ...]] = {
    "task": ("next_item", "conversion"),
    "model.join": ("concat", "sum"),
    "optim.name": ("adam", "adamw"),
    "optim.schedule": ("constant", "cosine"),
    "train.precision": ("fp32", "bf16"),
    "train.device": ("auto", "cpu", "cuda"),
    "tables.cpu_kernel": ("numba", "fbgemm"),
    "tables.replicated_optimizer": ("adam", "adagrad", "sgd"),
}
_POSITIVE = ("model.dim", "optim.lr", "train.log_every", "data.max_len", "train.timeout_s")
_NOT_NEGATIVE = (
    "train.num_epochs",
    "train.max_steps",
    "train.eval_every",
    "train.patience",
    "optim.warmup_steps",
    "optim.clip_norm",
    "optim.table_lr",
)


def check_config(config: RunConfig) -> RunConfig:
    """Returns the config when its values make sense together.

    Raises:
        ValueError: naming the key, its value and what it may be.
    """
    for key, allowed in _CHOICES.items():
        if _get(config, key) not in allowed:
            raise problem("A choice that does not exist", got=_get(config, key), wanted=allowed, where=key, todo=f"choose one for --{key}")
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        value = _get(config, key)
        if not value >= 0 or value == float("inf") or (key in _POSITIVE and value == 0):
            wanted = "above 0" if key in _POSITIVE else "0 or more"
            raise problem("A number out of range", got=value, wanted=wanted, where=key, todo=f"set --{key}")
    _check_budget(config)
    return config


def _check_budget(config: RunConfig) -> None:
    batching = config.batching
    budget = batching.global_tokens or batching.max_tokens
    if budget is not None and budget < config.data.max_len:
        where = "batching.global_tokens" if batching.global_tokens else "batching.max_tokens"
        todo = f"raise --{where} or lower --data.max_len, so that every sequence fits"
        raise problem(
            "The token budget is smaller than one sequence", got=budget, wanted=f"at least {config.data.max_len}", where=where, todo=todo
        )


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def choose(section: Any, table: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """Returns the class that a section names and its own Config, filled with what the section sets.

    A setting that only other classes know is ignored, so that switching `encoder.name` on the command line needs no other change.

    Raises:
        ValueError: no class of that name.
    """
    kind = table.get(section.name)
    if kind is None:
        near = difflib.get_close_matches(section.name, table, 1)
        wanted = f"one of {', '.join(table)}" + (f"; did you mean {near[0]!r}?" if near else "")
        raise problem(f"An unknown {where}", got=section.name, wanted=wanted, where=f"{where}.name", todo=f"set --{where}.name")
    given = {f.name: getattr(section, f.name) for f in dataclasses.fields(kind.Config)}
    return kind, kind.Config(**{key: value for key, value in given.items() if value is not None})
