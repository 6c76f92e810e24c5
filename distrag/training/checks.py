"""What a run refuses before it builds anything, shared by `distrag train` and `distrag plan`; needs no process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distrag.config import RunConfig, choose_encoder
from distrag.data.schema import Schema
from distrag.embedding.config import TableSpec, build_shardings, check_optimizer
from distrag.embedding.plan import Placement, build_placements, check_memory
from distrag.encoder import ENCODERS
from distrag.model import Inputs, SequenceModel
from distrag.problem import problem
from distrag.training.inputs import build_inputs, build_loss, build_specs

_BYTES_PER_PARAMETER = 16  # weight, gradient and the two moments of Adam


@dataclass(frozen=True)
class Checked:
    """The choices of a run that can work.

    Attributes:
        inputs: what the model reads of a batch.
        loss: the loss module.
        specs: tables.
        shardings: how each table is kept.
        placements: where each table lies.
        build_encoder: builds the encoder.
        cost: (a, b, c) of the encoder: a*L + b*L^2 + c for one sequence.
    """

    inputs: Inputs
    loss: Any
    specs: list[TableSpec]
    shardings: dict[str, str]
    placements: list[Placement]
    build_encoder: Callable[[], nn.Module]
    cost: tuple[float, float, float]


def check_job(config: RunConfig, schema: Schema, world_size: int, *, device: str, limit_bytes: int | None) -> Checked:
    """Returns the choices of a run on `world_size` ranks.

    Args:
        config: the run.
        schema: of its store.
        world_size: number of ranks.
        device: `cpu` or `cuda`; `auto` where it is not known yet.
        limit_bytes: what one rank may hold, in bytes; None where it is not known.

    Raises:
        ValueError: unknown ids, features, sizes or a combination that cannot work.
    """
    _check_unknown(config, schema)
    inputs, loss = build_inputs(config, schema), build_loss(config)
    specs = build_specs(inputs, schema, loss.negatives != "none")
    shardings = build_shardings(specs, config.tables)
    if set(shardings.values()) != {"replicated"}:
        check_optimizer(config.tables, device)
    _check_target(inputs, loss, shardings)
    placements = build_placements(specs, shardings, config.model.dim, world_size, config.tables)
    kind, settings = choose_encoder(config)
    _check_causal(config, kind)

    def build_encoder() -> nn.Module:
        encoder: nn.Module = kind(settings, config.model.dim, config.data.max_len)
        return encoder

    num_dense = _count_dense(config, inputs, loss, build_encoder)
    if limit_bytes is not None:
        check_memory(placements, world_size, limit_bytes)
        _check_dense(num_dense, limit_bytes)
    return Checked(inputs, loss, specs, shardings, placements, build_encoder, kind.cost(settings, config.model.dim))


def _check_unknown(config: RunConfig, schema: Schema) -> None:
    if config.data.on_unknown == "error":
        for feature in (*schema.history, *schema.context):
            if feature.num_unknown:
                todo = "mend the source, prepare again with --on-unknown error to see where, or set --data.on_unknown=count"
                raise problem(
                    "The store holds unknown ids", got=feature.num_unknown, wanted=0, where=f"feature {feature.name!r}", todo=todo
                )


def _check_causal(config: RunConfig, kind: Any) -> None:
    if config.task == "next_item" and not kind.causal:
        name: str = config.encoder.name  # type: ignore[attr-defined]
        raise problem(
            "An encoder that sees the future would read its own targets",
            got=f"{name} with next_item",
            wanted=[name for name, other in ENCODERS.items() if other.causal],
            where="encoder.name",
            todo="choose one of these, such as sasrec",
        )


def _check_target(inputs: Inputs, loss: Any, shardings: dict[str, str]) -> None:
    where = f"table {inputs.target_table!r}"
    if inputs.target and inputs.num_items < 2:
        todo = "prepare the store again from data that has items"
        raise problem("The catalogue is empty", got=0, wanted="at least 1 item", where=where, todo=todo)
    if loss.needs_table and shardings[inputs.target_table] != "replicated":
        todo = f"set --tables.shard_rows above {inputs.num_items}, or use --loss.name=sampled_softmax"
        got = shardings[inputs.target_table]
        raise problem("full_softmax needs the whole item table on each rank", got=got, wanted="replicated", where=where, todo=todo)


def _count_dense(config: RunConfig, inputs: Inputs, loss: Any, build_encoder: Callable[[], nn.Module]) -> int:
    """Returns the dense parameters of the model, from one that is built without memory; its own refusals are raised here."""
    no_tables: Any = nn.Identity()
    with torch.device("meta"):
        model = SequenceModel(config.model, inputs, no_tables, build_encoder(), loss)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_dense(num_dense: int, limit_bytes: int) -> None:
    if num_dense * _BYTES_PER_PARAMETER > limit_bytes:
        gib = num_dense * _BYTES_PER_PARAMETER / 2**30
        raise problem(
            "The dense part does not fit",
            got=f"{num_dense:,} parameters, {gib:.3g} GiB with gradients and optimizer state",
            wanted=f"at most {limit_bytes / 2**30:.3g} GiB a rank",
            where="model and encoder",
            todo="lower model.dim, model.head_hidden, data.max_len or the encoder's sizes",
        )


def check_length(config: RunConfig, steps_per_epoch: int) -> int:
    """Returns the global steps that the config asks for: the smaller of `max_steps` and `num_epochs`, of those that are set.

    Raises:
        ValueError: neither is set, or an epoch has no step.
    """
    if steps_per_epoch == 0:
        todo = "prepare a store with samples, or change data.split"
        raise problem("No sample to train on", got="0 steps in an epoch", wanted="at least 1", where="the train view", todo=todo)
    limits = [limit for limit in (config.train.max_steps, config.train.num_epochs * steps_per_epoch) if limit > 0]
    if not limits:
        todo = "set --train.max_steps or --train.num_epochs"
        raise problem("The run has no length", got="max_steps 0, num_epochs 0", wanted="one of them above 0", where="train", todo=todo)
    return min(limits)


def check_run_dir(run_dir: str | Path) -> None:
    """Refuses a run directory that cannot be made or written, from what is there now; for the one rank that writes.

    Raises:
        ValueError: it, or the nearest folder above it, is a file or not writable.
    """
    path = Path(run_dir).absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    todo = "set --train.run_dir to a folder that can be written"
    if not path.is_dir():
        raise problem("The run directory cannot be made", got=f"{path} is no folder", wanted="a folder", where="train.run_dir", todo=todo)
    if not os.access(path, os.W_OK | os.X_OK):
        raise problem(
            "The run directory cannot be written",
            got=f"no right to write in {path}",
            wanted="write access",
            where="train.run_dir",
            todo=todo,
        )
