"""What would make N ranks differ from one is refused at start, with the reason and the nearest exact choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distrag.config import known_keys, read_config
from distrag.training.plan import open_subject
from tests.exact.cases import Case, build_store, config

BASE = Case("mean", "sampled_softmax", "row_wise", "rowwise_adagrad")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("refusals") / "store")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("tables.momentum", "tables.optimizer=adagrad"),
        ("optim.nesterov", "tables.optimizer=adagrad"),
        ("tables.weight_decay", "optim.weight_decay"),
        ("tables.l2", "optim.weight_decay"),
        ("tables.gradient_clipping", "optim.clip_norm"),
        ("tables.max_gradient", "optim.clip_norm"),
        ("batching.accumulation_steps", "batching.global_tokens"),
        ("train.gradient_accumulation", "batching.global_tokens"),
        ("tables.dtype", "train.precision"),
        ("tables.stochastic_rounding", "train.precision"),
        ("tables.zch_slots", "num_buckets"),
        ("batching.batch_size", "batching.global_tokens"),
        ("batching.drop_last", "every sample"),
    ],
)
def test_a_setting_that_would_not_be_exact_is_answered_with_the_reason_and_what_is_nearest(key: str, instead: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    (tmp_path / "c.yaml").write_text(f"{section}: {{{name}: 1}}\n")
    for given in ([f"--{key}=1"], ["--config", str(tmp_path / "c.yaml")], {section: {name: 1}}):
        with pytest.raises(ValueError, match=r"A setting that would not be exact, so there is none") as error:
            read_config(given)
        assert key in str(error.value)
        assert instead in str(error.value).split("wanted:")[1].split("where:")[0]


def test_no_setting_that_there_is_is_taken_for_one_that_there_is_not() -> None:
    from distrag.config.inexact import refuse_inexact

    for key in known_keys():
        refuse_inexact(key, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tables__sharding": "column_wise"},
            "(?s)column_wise keeps one row-wise Adagrad state per shard.*adagrad or sgd.*sharding=row_wise",
        ),
        ({"tables__per_table": {"item": "column_wise"}}, "(?s)column_wise keeps one row-wise Adagrad state per shard.*table item"),
        ({"tables__optimizer": "adam"}, "(?s)No such fused optimizer on this device.*adam on cpu.*rowwise_adagrad.*replicate the table"),
        ({"tables__replicated_optimizer": "rowwise_adagrad"}, "(?s)A choice that does not exist.*tables.replicated_optimizer"),
        (
            {"loss__name": "full_softmax"},
            "(?s)full_softmax needs the whole item table.*shard_rows above 60, or use --loss.name=sampled_softmax",
        ),
        ({"tables__optimizer": "sgd", "tables__sharding": "column_wise", "model__dim": 10}, "(?s)A width.*multiple of 12, such as 12"),
        ({"batching__locality": "node"}, "(?s)Steps cannot be the same for every number of nodes"),
        ({"encoder__name": "self_attention"}, "(?s)sees the future"),
    ],
)
def test_a_combination_that_cannot_be_exact_is_refused_before_anything_starts(changes: dict[str, Any], message: str, store: Path) -> None:
    sections = config(BASE, store, store.with_name("run"))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section] = {**sections[section], name: value}
    with pytest.raises(ValueError, match=message):
        open_subject(read_config(sections), 3)
