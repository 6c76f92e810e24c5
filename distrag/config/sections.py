"""What a config holds: the sections as dataclasses, and the encoder and loss that they name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docstring_parser

from distrag.batching.config import BatchingConfig
from distrag.data.config import DataConfig
from distrag.data.remote import is_url
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
        eps: of Adam, and of Adagrad of replicated tables.
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
        metric: what early stopping and the best checkpoint watch: hr@k, ndcg@k or mrr@k of eval_ks (next_item); auc, gauc, gauc_mean,
            log_loss or ne (conversion). Empty means ndcg@10, or that of the largest k, and auc.
        patience: evaluations without improvement before training stops; 0 never stops early.
        refit: once valid has chosen the best step, train afresh for as many epochs on train and valid together, then test.
        seed: of everything random.
        precision: fp32, bf16 or fp16 (dense part under autocast; tables and loss stay float32).
        loss_scale: first scale of the loss under fp16; it halves when a step overflows and doubles after 2000 good ones.
        max_bad_steps: steps in a row that may be skipped because of a NaN or infinity, before the run stops.
        pipeline: exchange the ids of the next batch while this one computes (several ranks).
        device: auto, cpu or cuda.
        timeout_s: how long a collective may wait for another rank, in seconds.
        tensorboard: write TensorBoard events.
        save_every: steps between saves of the state, checkpoints/step-<n>; 0 saves at the end of each epoch.
        keep: how many of the newest saves stay, beside the best.
        async_save: write a save while training goes on, from a copy in the memory of the host where it has room; the next one waits.
        resume: go on with the run in run_dir from its newest whole save, on as many ranks as there are now; without one start anew.
        init: a run, or one of its checkpoints, whose weights a new run starts from; its optimizers start anew.
        log_samples: write the sample numbers of every step to samples/rank-<r>.jsonl.
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
    loss_scale: float = 65536.0
    max_bad_steps: int = 20
    pipeline: bool = False
    device: str = "auto"
    timeout_s: float = 300.0
    tensorboard: bool = True
    save_every: int = 0
    keep: int = 2
    async_save: bool = True
    resume: bool = False
    init: str = ""
    log_samples: bool = False


def _section(title: str, table: Mapping[str, Any]) -> type[Any]:
    """Returns one dataclass with every field that any class of `table` has; None means that class's own default.

    Its docstring, which becomes `--help`, repeats what the classes say of a field, with the default of each.
    """
    types: dict[str, dict[str, None]] = {}
    texts: dict[str, dict[str, list[str]]] = {}
    for name, kind in table.items():
        said = {entry.arg_name: entry.description for entry in docstring_parser.parse(kind.Config.__doc__ or "").params}
        for entry in dataclasses.fields(kind.Config):
            types.setdefault(entry.name, {})[str(entry.type)] = None
            text = " ".join((said.get(entry.name) or "no description").split()).rstrip(".")
            texts.setdefault(entry.name, {}).setdefault(text, []).append(f"{name} {entry.default}")
    made = dataclasses.make_dataclass(
        f"{title}Config", [("name", str, ""), *((key, " | ".join([*kinds, "None"]), None) for key, kinds in types.items())], frozen=True
    )
    phrases = {key: [f"{text} ({', '.join(who)})" for text, who in said.items()] for key, said in texts.items()}
    lines = [f"        {key}: {'; '.join(its)}." for key, its in phrases.items()]
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


def choose_encoder(config: RunConfig) -> tuple[Any, Any]:
    """Returns the encoder class that the config names and its Config.

    Raises:
        ValueError: no such encoder.
    """
    return choose(config.encoder, ENCODERS, "encoder")


def choose_loss(config: RunConfig) -> tuple[str, Any, Any]:
    """Returns name and class of the loss that the config names, and its Config; the task chooses one when it names none.

    Raises:
        ValueError: no such loss, or one of another task.
    """
    section: Any = config.loss
    name = section.name or ("binary" if config.task == "conversion" else "sampled_softmax")
    if config.task == "conversion" and name == "bce":
        name = "binary"  # binary cross-entropy means the label here, the sampled negatives there
    kind, settings = choose(dataclasses.replace(section, name=name), LOSSES, "loss")
    if kind.task != config.task:
        fitting = [key for key, other in LOSSES.items() if other.task == config.task]
        got = f"{name} with {config.task}"
        raise problem("The loss does not fit the task", got=got, wanted=fitting, where="loss.name", todo="choose one of these")
    return name, kind, settings


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns the config as nested plain values, as YAML holds it, that read back to the same run from any folder, whatever the defaults.

    Encoder and loss are named with all their own settings and no others; paths of `data` and `train.init` are absolute.

    Raises:
        ValueError: no such encoder or loss, or a loss of another task.
    """
    name, _, settings = choose_loss(config)
    plain = {**dataclasses.asdict(config), "loss": {"name": name, **dataclasses.asdict(settings)}}
    encoder: Any = config.encoder
    plain["encoder"] = {"name": encoder.name, **dataclasses.asdict(choose_encoder(config)[1])}
    for key, path in (("path", config.data.path), ("cache", config.data.cache)):
        if path and not is_url(path):
            plain["data"][key] = str(Path(path).absolute())
    if config.train.init:
        plain["train"]["init"] = str(Path(config.train.init).absolute())
    return {key: _plain(value) for key, value in plain.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
