"""The exported file back into a model: an ordinary module with ordinary tables, in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distrag.config import choose_encoder, read_config
from distrag.data.schema import parse_schema
from distrag.embedding.boundary import Boundary
from distrag.embedding.config import TableSpec
from distrag.embedding.tables import Tables
from distrag.export.write import FORMAT
from distrag.model import SequenceModel
from distrag.problem import problem
from distrag.training.inputs import build_inputs, build_loss, build_specs


def load_model(path: str | Path) -> SequenceModel:
    """Returns the model of a file that `distrag export` wrote, in eval mode, on the CPU, float32; without a process group.

    `predict` and `query` take a RaggedBatch with the history and context keys of the model (`model.tables.key_order`); a Collate of a store
    makes them. The rows of a table are `model.tables.replicated.embeddings[name].weight`, mapped from the file until they are used.

    Args:
        path: the file.

    Raises:
        ValueError: no such file, one that `distrag export` did not write, or one whose tensors do not fit its own config.
    """
    about, tensors = _read(Path(path))
    model = _build(about, path)
    wanted, got = model.state_dict(), {_module_name(name): tensor for name, tensor in tensors.items()}
    differ = [name for name in {**wanted, **got} if name not in wanted or name not in got or wanted[name].shape != got[name].shape]
    if differ:
        todo = "export the run again with this version of distrag"
        raise problem("The file does not fit its config", got=differ, wanted="the parameters of the model", where=path, todo=todo)
    model.load_state_dict(got, assign=True)
    return model.eval()


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        todo = "mend the path, or export the run again"
        raise problem("The model cannot be read", got=error, wanted="a file of `distrag export`", where=path, todo=todo) from None
    if about.get("format") != FORMAT:
        todo = "write it with `distrag export RUN --out FILE`"
        raise problem("Not an exported model", got=about.get("format"), wanted=FORMAT, where=path, todo=todo)
    return about, tensors


def _build(about: Mapping[str, str], path: str | Path) -> SequenceModel:
    """Returns the model of a config and a schema, its tables without memory."""
    config, schema = read_config(json.loads(about["config"]), writes=False), parse_schema(about["schema"].encode(), str(path))
    inputs, loss = build_inputs(config, schema), build_loss(config)
    served = {*inputs.history_keys, *inputs.context_keys}
    # What is only looked up in training, the next item and negatives, is no input of a served model.
    specs = [TableSpec(spec.name, spec.num_rows, tuple(k for k in spec.keys if k in served)) for spec in build_specs(inputs, schema, False)]
    with torch.device("meta"):
        tables = Tables(specs, dict.fromkeys((spec.name for spec in specs), "replicated"), config.model.dim, init_std=0.0, seed=0)
    tables.boundary = Boundary()
    kind, settings = choose_encoder(config)
    encoder: Any = kind(settings, config.model.dim, config.data.max_len)
    return SequenceModel(config.model, inputs, tables, encoder, loss, seed=config.train.seed)


def _module_name(name: str) -> str:
    table = name.removeprefix("tables.").removesuffix(".weight")
    return f"tables.replicated.embeddings.{table}.weight" if name.startswith("tables.") else name
