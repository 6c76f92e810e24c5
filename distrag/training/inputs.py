"""What the model reads and learns from, chosen by the config out of a store's schema; needs no process group."""

from __future__ import annotations

from typing import Any

from distrag.config import RunConfig, choose_loss
from distrag.data.schema import Feature, Schema
from distrag.data.split import Part, View, build_views
from distrag.data.store import Store
from distrag.embedding.config import TableSpec
from distrag.model import Inputs
from distrag.problem import problem


def build_loss(config: RunConfig) -> Any:
    """Returns the loss module the config names; the task chooses one when it names none.

    Raises:
        ValueError: an unknown loss, or one of another task.
    """
    _, kind, settings = choose_loss(config)
    return kind(settings)


def build_run_views(config: RunConfig, store: Store, cost: tuple[float, float, float], *, fold_valid: bool = False) -> dict[Part, View]:
    """Returns the samples of train, valid and test as the config splits and cuts them; train at epoch 0.

    Args:
        config: the run.
        store: its store.
        cost: (a, b, c) of the encoder's arithmetic. A cost that was timed on a machine would make the data depend on that machine.
        fold_valid: train on train and valid together.

    Raises:
        ValueError: a split or a cut that does not fit the store.
    """
    data = config.data
    return build_views(
        store,
        data.split,
        task=config.task,  # type: ignore[arg-type]
        max_len=data.max_len,
        fold_valid=fold_valid,
        truncate=data.truncate,
        mean_cost_share=data.mean_cost_share,
        cost=cost,
        seed=config.train.seed,
    )


def build_inputs(config: RunConfig, schema: Schema) -> Inputs:
    """Returns what the model reads, chosen by `data.history`, `data.context` and `data.target` out of the schema."""
    history, context = (
        choose_features(config.data.history, schema.history, "history"),
        choose_features(config.data.context, schema.context, "context"),
    )
    _check_names(history, context)
    keys = tuple(_key(f) for f in history if _key(f))
    common: dict[str, Any] = {
        "task": config.task,
        "history_keys": keys,
        "num_numbers": sum(f.kind == "number" or (f.kind == "time" and f.gap == "log") for f in history),
        "context_keys": tuple(f.name for f in context if f.kind == "id"),
        "num_context": sum(f.kind == "number" for f in context),
    }
    if not keys and not common["num_numbers"]:
        raise problem(
            "The model would read nothing",
            got=[f.name for f in history],
            wanted="at least one id or number",
            where="data.history",
            todo="name features",
        )
    if config.task == "conversion":
        if schema.label is None:
            raise problem(
                "The store has no labels",
                got="none",
                wanted="a label column",
                where=config.data.path,
                todo="name it in the schema of `distrag prepare`",
            )
        return Inputs(**common)
    ids = [f for f in history if f.kind == "id"]
    name = config.data.target or (ids[0].name if ids else "")
    feature = next((f for f in ids if f.name == name), None)
    if feature is None or feature.table is None:
        got = name or "nothing"
        raise problem(
            "next_item predicts an id feature of the history",
            got=got,
            wanted=[f.name for f in ids],
            where="data.target",
            todo="name one of these; a column of floats was read as numbers: give it `kind: id` in the schema of `distrag prepare`",
        )
    return Inputs(**common, target=name, target_table=feature.table, num_items=schema.table(feature.table).num_rows)


def _check_names(history: list[Feature], context: list[Feature]) -> None:
    both = sorted({f.name for f in history if f.kind == "id"} & {f.name for f in context if f.kind == "id"})
    if both:
        todo = "leave it out of one of them, or prepare it under two names"
        raise problem(
            "A feature of both history and context", got=both, wanted="one place each", where="data.history, data.context", todo=todo
        )


def choose_features(names: list[str] | None, features: tuple[Feature, ...], where: str) -> list[Feature]:
    """Returns the named features in the asked order, or all of them; those that no model reads are only refused when named.

    Args:
        names: what the config asks for; None asks for all.
        features: of the store.
        where: `history` or `context`.

    Raises:
        ValueError: a name the store does not have, or a time that no model reads.
    """
    if names is None:
        return list(features)
    known = {feature.name: feature for feature in features}
    for name in names:
        if name not in known:
            raise problem("The store has no such feature", got=name, wanted=sorted(known), where=f"data.{where}", todo="name one of these")
        if not is_read(known[name], where):
            todo = f"leave it out of data.{where}" + (", or prepare it with gap: log or bucket" if where == "history" else "")
            raise problem(
                "A time that the model would not read",
                got=name,
                wanted=[f.name for f in features if is_read(f, where)],
                where=f"data.{where}",
                todo=todo,
            )
    return [known[name] for name in names]


def is_read(feature: Feature, where: str) -> bool:
    """Returns whether a model can read a feature of the `history` or the `context`: a time only as gaps between events."""
    return feature.kind != "time" or (where == "history" and feature.gap != "none")


def _key(feature: Feature) -> str:
    """Returns the KJT key of a per-position feature, or '' when it is a number."""
    if feature.kind == "id":
        return feature.name
    return f"{feature.name}:gap" if feature.kind == "time" and feature.gap == "bucket" else ""


def build_specs(inputs: Inputs, schema: Schema, negatives: bool) -> list[TableSpec]:
    """Returns the tables that the model looks up, each with all keys that read it."""
    keys = [*inputs.history_keys, *inputs.context_keys]
    table_of = {feature: table.name for table in schema.tables for feature in table.features}
    if inputs.target:
        extra = [f"{inputs.target}:next", *([f"{inputs.target}:negative"] if negatives else [])]
        keys += extra
        table_of.update(dict.fromkeys(extra, inputs.target_table))
    used: dict[str, list[str]] = {}
    for key in keys:
        used.setdefault(table_of[key], []).append(key)
    return [TableSpec(name, schema.table(name).num_rows, tuple(its)) for name, its in used.items()]
