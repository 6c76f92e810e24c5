"""The config: defaults < YAML < command line, unknown keys named with their nearest, refusals in five parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distrag.config import build_parser, choose, choose_encoder, choose_loss, known_keys, read_config, to_dict
from distrag.encoder import ENCODERS

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
    ],
)
def test_values_that_cannot_be_right_are_refused_in_five_parts(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)got: .*wanted: .*where: .*to do: "):
        read_config(words)


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
