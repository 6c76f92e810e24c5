"""The config: defaults < YAML < command line, unknown keys named with their nearest, refusals in five parts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distrag.config import RunConfig, build_parser, choose, choose_encoder, choose_loss, known_keys, read_config, to_dict
from distrag.data.write import write_store
from distrag.encoder import ENCODERS
from distrag.training.plan import plan_run

SCRIPT_KEYS = [
    *("data.path", "data.max_len", "batching.max_tokens", "batching.global_tokens", "batching.bucket_steps", "model.dim", "encoder.name"),
    *("encoder.num_layers", "encoder.num_heads", "loss.name", "task", "train.max_steps", "train.num_epochs", "train.log_every"),
    *("train.eval_every", "train.run_dir", "train.seed", "train.precision", "optim.lr", "optim.table_lr", "tables.shard_rows"),
]


def test_the_keys_that_scripts_rely_on_exist() -> None:
    assert set(SCRIPT_KEYS) <= set(known_keys())


def test_command_line_wins_over_yaml_wins_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optim: {lr: 0.5, clip_norm: 2.0}\nencoder: {name: gru, num_layers: 2}\ndata: {split: {kind: row}}\n")
    config = read_config(["--config", str(path), "--optim.lr=0.25", "--encoder.num_layers", "3"])
    assert (config.optim.lr, config.optim.clip_norm, config.optim.table_lr) == (0.25, 2.0, 0.05)
    assert (config.encoder.name, config.encoder.num_layers, config.data.split.kind) == ("gru", 3, "row")


def test_a_written_config_reads_back_the_same(tmp_path: Path) -> None:
    config = read_config(["--tables.per_table", "{item: row_wise}", "--train.eval_ks", "[1, 3]", "--loss.name=bce"])
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    assert not {None} & {*to_dict(config)["encoder"].values(), *to_dict(config)["loss"].values()}
    again = read_config(["--config", str(path)])
    assert to_dict(again) == to_dict(config)
    assert choose_encoder(again) == choose_encoder(config)
    assert choose_loss(again) == choose_loss(config)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--optim.lrr=1", "optim.lr"),
        ("--encodr.name=gru", "encoder.name"),
        ("--max_tokens=5", "batching.max_tokens"),
        ("--dim", "model.dim"),
    ],
)
def test_an_unknown_word_names_the_nearest_key(word: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)An unknown config key.*did you mean '{nearest}'.*command line"):
        read_config([word])


def test_an_unknown_key_in_yaml_names_file_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("batching: {max_token: 5}\n")
    with pytest.raises(ValueError, match=r"(?s)batching.max_token\n.*did you mean 'batching.max_tokens'.*c.yaml"):
        read_config(["--config", str(path)])


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.lr=abc"],
        ["--optim.lr=nan"],
        ["--optim.lr=-1"],
        ["--optim.lr=inf"],
        ["--model.dim=0"],
        ["--model.dim=1.5"],
        ["--task=next"],
        ["--train.precision=fp16x"],
        ["--data.max_len=0"],
        ["--batching.max_tokens=10", "--data.max_len=11"],
        ["--batching.global_tokens=10", "--data.max_len=11"],
        ["--train.max_steps=-1"],
        ["--config", "does-not-exist.yaml"],
        ["--data.max_len=2147483648"],
        ["--data.history=[a, b, a]"],
        ["--data.history=[a]", "--data.context=[a]"],
        ["--data.split.seed=-1"],
        ["--data.split.valid_share=1.5"],
        ["--batching.max_tokens=null"],
        ["--batching.max_samples=0"],
        ["--batching.bucket_steps=1e19"],
        ["--batching.bucket_steps=10000000000000000000"],
        ["--batching.prefetch=-1"],
        ["--model.head_hidden=[8, 0]"],
        ["--model.dim=100000000"],
        ["--encoder.dropout=1"],
        ["--encoder.ffn_factor=1e9"],
        ["--encoder.num_layers=0"],
        ["--loss.temperature=0"],
        ["--loss.num_negatives=0"],
        ["--tables.optimizer=rowwise"],
        ["--tables.sharding=rows"],
        ["--tables.init_std=-0.1"],
        ["--tables.eps=-1"],
        ["--tables.max_gib_per_rank=-1"],
        ["--optim.betas=[0.9, 1.0]"],
        ["--optim.betas=[0.9]"],
        ["--optim.eps=-1e-8"],
        ["--optim.weight_decay=-1"],
        ["--optim.min_lr_share=1.1"],
        ["--train.eval_ks=[]"],
        ["--train.eval_ks=[5, 0]"],
        ["--train.metric=users"],
        ["--train.metric=num_nan"],
        ["--train.metric=auc"],
        ["--train.metric=ndcg@7"],
        ["--task=conversion", "--train.metric=ndcg@10"],
        ["--train.seed=-1"],
        ["--train.seed=2147483648"],
        ["--train.run_dir="],
        ["--train.run_dir=" + 300 * "a"],
        ["--train.timeout_s=1e300"],
        ["--optim=5"],
    ],
)
def test_values_that_cannot_be_right_are_refused_in_five_parts(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)got: .*wanted: .*where: .*to do: "):
        read_config(words)


@pytest.mark.parametrize(
    "tree", [{"optim": None}, {"optim": {"lr": None}}, {"debug": None}, {"data": {"split": "row"}}, {"encoder": "gru"}]
)
def test_nulls_and_values_in_place_of_sections_are_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"(?s)got: .*wanted: .*where: .*to do: "):
        read_config(tree)


def test_a_config_file_without_its_key_is_told_the_key() -> None:
    with pytest.raises(ValueError, match=r"(?s)belongs to no key.*configs/debug.yaml.*write --config configs/debug.yaml"):
        read_config(["configs/debug.yaml", "--optim.lr=1"])


def test_the_metric_of_any_cut_off_may_be_watched() -> None:
    assert read_config(["--train.eval_ks=[7]", "--train.metric=mrr@7"]).train.metric == "mrr@7"
    assert read_config(["--task=conversion", "--train.metric=ne"]).train.metric == "ne"


def test_a_written_config_names_the_store_from_the_root_and_the_loss_that_the_task_chose() -> None:
    written = to_dict(read_config(["--task=conversion", "--data.path=stores/mine", "--encoder.name=mean", "--loss.name=bce"]))
    assert written["data"]["path"] == str(Path.cwd() / "stores" / "mine")
    assert written["loss"] == {"name": "binary"}
    assert written["encoder"] == {"name": "mean"}


def test_settings_of_another_encoder_do_not_stand_in_the_way() -> None:
    config = read_config(["--encoder.name=mean", "--encoder.num_layers=2", "--encoder.num_heads=1"])
    kind, settings = choose(config.encoder, ENCODERS, "encoder")
    assert kind is ENCODERS["mean"]
    assert settings == kind.Config()


def test_an_unknown_encoder_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"(?s)An unknown encoder.*did you mean 'sasrec'"):
        choose(read_config(["--encoder.name=sasrek"]).encoder, ENCODERS, "encoder")


def test_help_explains_every_key_that_scripts_rely_on() -> None:
    text = build_parser().format_help()
    assert [key for key in SCRIPT_KEYS if key not in text] == []
    assert "longest history" in text


def test_help_quotes_the_docstring_and_the_default_of_each_class() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "transformer blocks (self_attention 1, sasrec 2)" in text
    assert "recurrent layers on top of each other (gru 1)" in text
    assert "what dot products are divided by (full_softmax 1.0)" in text
    assert "no description" not in text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "store"
    time = np.arange(12)
    write_store(
        path,
        history={"item": np.arange(12) % 5 + 1, "price": np.linspace(0, 1, 12), "seen": time, "read": time},
        offsets=[0, 4, 4, 9, 12],
        context={"city": np.array([1, 2, 1, 3]), "since": np.arange(4)},
        label=[0, 1, 0, 1],
        features={"seen": {"kind": "time"}, "read": {"kind": "time", "gap": "log"}, "since": {"kind": "time"}},
    )
    return path


FIVE = ["what", "got", "wanted", "where", "to do"]

NAMES = st.sampled_from(
    [
        *(
            "",
            "x",
            "nan",
            "a\0b",
            "\ud800",
            3000 * "y",
            "item",
            "seen",
            "ndcg@5",
            "auc",
            "row_wise",
            "column_wise",
            "table_wise",
            "replicated",
        ),
        *(
            "adam",
            "sgd",
            "adagrad",
            "gru",
            "mean",
            "self_attention",
            "full_softmax",
            "bce",
            "binary",
            "next_item",
            "conversion",
            "row",
            "time",
        ),
        *("sum", "cosine", "bf16", "cuda", "cpu", "error", "gelu", "swiglu", "fbgemm"),
    ]
)
WHOLE = (
    st.sampled_from([0, 1, 2, 3, 4, 6, 8, 17, 64, 256, 5000, -1, 10**6, 2**31 - 1, 2**31, 2**62, 2**63, 10**19, 10**400]) | st.integers()
)
REAL = st.sampled_from([0.0, 1e-308, 1e-6, 0.5, 1.0, -0.5, 2.0, 1e9, 1e19, 1e308, -1e308, float("nan"), float("inf")]) | st.floats()
LISTS = st.lists(WHOLE | REAL, max_size=3) | st.lists(NAMES | st.sampled_from(["item", "price", "city", "read", "since"]), max_size=3)
KINDS = {
    "int": WHOLE,
    "float": REAL,
    "str": NAMES,
    "tuple": LISTS,
    "list": LISTS,
    "bool": st.booleans(),
    "dict": st.dictionaries(NAMES, NAMES),
}
ODD = st.one_of(st.none(), st.just([[]]), st.just({"a": {"b": 1}}), st.text(max_size=5), *KINDS.values())


def values_of(key: str) -> st.SearchStrategy[object]:
    """Mostly values of the key's own type, from sound to absurd; one in ten of any type."""
    kind: object = RunConfig
    for part in key.split("."):
        kind = get_type_hints(kind)[part]
    name = next((name for name in ("dict", "list", "tuple", "bool", "int", "float") if name in str(kind)), "str")
    return st.integers(0, 9).flatmap(lambda n: ODD if n == 0 else KINDS[name])


CHANGES = st.sampled_from(known_keys()).flatmap(lambda key: st.tuples(st.just(key), values_of(key)))


@settings(max_examples=150, deadline=5_000, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=3),
    world_size=st.sampled_from([1, 1, 2, 3, 64, 0, 10**12]),
)
def test_any_values_are_planned_or_refused_in_five_parts(store: Path, changes: list[tuple[str, object]], world_size: int) -> None:
    tree: dict[str, object] = {"data": {"path": str(store), "max_len": 5}, "train": {"max_steps": 3}, "model": {"dim": 8}}
    for key, value in changes:
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})  # type: ignore[assignment]
        at[last] = value
    refusal = ""
    try:
        with contextlib.chdir(store.parent):  # a cache may be any name
            assert plan_run(read_config(tree), world_size)["num_samples"] > 0
    except ValueError as error:
        refusal = str(error)
    parts = [line.strip().split(":")[0] for line in refusal.splitlines()]
    assert not refusal or [part for part in parts if part in FIVE[1:]] == FIVE[1:], refusal
