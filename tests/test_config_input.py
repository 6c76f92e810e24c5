"""A config is read once, by the types of its keys: what is written is what is used, or it is refused with the key and the file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml

from distrag.config import read_config, to_dict
from distrag.data.text_file import dump_yaml, parse_yaml


def written(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "c.yaml").write_text(text)
    return ["--config", str(tmp_path / "c.yaml")]


@pytest.mark.parametrize(
    ("text", "got", "wanted", "key"),
    [
        ("optim: {lr: '0.1'}", "'0.1'", "a number", "optim.lr"),
        ("optim: {lr: true}", "true", "a number", "optim.lr"),
        ("model: {dim: 8.0}", "8.0", "a whole number", "model.dim"),
        ("model: {dim: true}", "true", "a whole number", "model.dim"),
        ("debug: 1", "1", "true or false", "debug"),
        ("debug: 'true'", "'true'", "true or false", "debug"),
        ("encoder: {name: 3}", "3", "a text", "encoder.name"),
        ("data: {history: item}", "'item'", "a list of texts", "data.history"),
        ("data: {history: [item, 3]}", "['item', 3]", "a list of texts", "data.history"),
        ("data: {on_unknown: maybe}", "'maybe'", "one of count, error", "data.on_unknown"),
        ("train: {eval_ks: 5}", "5", "a list of whole numbers", "train.eval_ks"),
        ("train: {eval_ks: [5, null]}", "[5, None]", "a list of whole numbers", "train.eval_ks"),
        ("optim: {betas: [0.9]}", "[0.9]", "a list of 2 numbers", "optim.betas"),
        ("batching: {cost: [1, 2, x]}", "[1, 2, 'x']", "a list of 3 numbers or null", "batching.cost"),
        ("batching: {max_samples: none}", "'none'", "a whole number or null", "batching.max_samples"),
        ("tables: {per_table: [a]}", "['a']", "a mapping of texts to texts", "tables.per_table"),
        ("tables: {per_table: {a: 1}}", "{'a': 1}", "a mapping of texts to texts", "tables.per_table"),
        ("optim: {lr: {a: 1}}", "{'a': 1}", "a number", "optim.lr"),
        ("optim: {lr: null}", "null", "a number", "optim.lr"),
        ("optim.lr: x", "'x'", "a number", "optim.lr"),
        ("optim: {lr: 99999999999999999999999999999999999999999999}", "e+", "at most", "optim.lr"),
    ],
)
def test_values_of_another_type_are_named_with_key_and_file(tmp_path: Path, text: str, got: str, wanted: str, key: str) -> None:
    with pytest.raises(ValueError, match=r"got: .*\n.*wanted: .*\n.*where: ") as caught:
        read_config(written(tmp_path, text))
    lines = {line.split(":")[0].strip(): line for line in str(caught.value).splitlines()[1:]}
    assert got in lines["got"]
    assert any(part in lines["wanted"] for part in wanted.split("|"))
    assert key in lines["where"]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--optim.lr=1e-3"], "optim.lr", 0.001),
        (["--optim.lr", "1"], "optim.lr", 1.0),
        (["--data.history=[item, '3']"], "data.history", ["item", "3"]),
        (["--data.target=3"], "data.target", "3"),
        (["--data.target=null"], "data.target", None),
        (["--data.path=null"], "data.path", "null"),
        (["--batching.global_tokens=null"], "batching.global_tokens", None),
        (["--optim={lr: 0.5, clip_norm: 2}"], "optim.clip_norm", 2.0),
        (
            ["--tables.per_table={a: row_wise}", "--tables.per_table.b.c=replicated"],
            "tables.per_table",
            {"a": "row_wise", "b.c": "replicated"},
        ),
        (["--train.eval_ks=[1,2]"], "train.eval_ks", (1, 2)),
        (["--debug=true"], "debug", True),
        (["--train.seed=010"], "train.seed", None),
    ],
)
def test_words_are_read_by_the_type_of_their_key(words: list[str], key: str, value: object) -> None:
    if key == "train.seed":
        with pytest.raises(ValueError, match="A value of another type"):  # neither 8 nor 10
            read_config(words)
        return
    found: object = read_config(words)
    for part in key.split("."):
        found = getattr(found, part)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {dim: 8}\nmodel: {dim: 16}", "line 2: the key 'model' twice"),
        ("optim: {lr: 1, lr: 2}", "the key 'lr' twice"),
        ("optim: {lr: 1}\noptim.lr: 2", "A key is given twice(.|\n)*optim.lr"),
        ("optim: &a {lr: *a}", "holds itself"),
        ("debug: !!python/object/apply:os.system [echo]", "the tag"),
        ("optim: " + "[" * 5000, "cannot be read"),
        ("- optim", "no mapping(.|\n)*a list"),
        ("optim", "no mapping(.|\n)*a text"),
        ("optim: 3", "A section is no mapping(.|\n)*optim in .*c.yaml"),
        ("data: {split: null}", "A section is no mapping(.|\n)*data.split"),
        ("optim: {1: 2}", "no text"),
        ("optim: {lr.x: 2}", "An unknown config key(.|\n)*optim.lr"),
        ("x" * 100_000 + ": 1", "An unknown config key|cannot be read"),
        ("optim: {lr: 1e-310}", "A number out of range"),
    ],
)
def test_files_that_say_no_one_thing_are_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        read_config(written(tmp_path, text))
    assert "to do:" in str(caught.value)


def test_later_words_and_files_win_over_earlier_ones(tmp_path: Path) -> None:
    file = written(tmp_path, "optim: {lr: 0.5}\nmodel: {dim: 4}")
    assert read_config(["--optim.lr=0.25", *file]).optim.lr == 0.5
    assert read_config([*file, "--optim.lr=0.25"]).optim.lr == 0.25
    (tmp_path / "d.yaml").write_text("model: {dim: 6}")
    both = read_config([*file, "--config", str(tmp_path / "d.yaml")])
    assert (both.optim.lr, both.model.dim) == (0.5, 6)


@pytest.mark.parametrize(
    "words", [["--model.dim"], ["--model.dim", "--debug=true"], ["--config"], ["--config="], ["--model.dim="], ["--", "x"], ["--=1"]]
)
def test_words_without_what_belongs_to_them_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)got: .*wanted: .*where: .*to do: "):
        read_config(words)


def test_a_config_from_a_pipe_is_read_once_and_whole(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()

    def write() -> None:
        with os.fdopen(write_end, "w") as file:
            file.write("optim: {lr: 0.5}")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_config([f"--config=/dev/fd/{read_end}"]).optim.lr == 0.5
    writer.join()
    os.close(read_end)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a pipe that nobody writes to"):
        read_config([f"--config={tmp_path / 'pipe'}"])


def test_a_written_config_reads_back_the_same_even_where_names_look_like_numbers() -> None:
    config = read_config(["--data.target=1e3", "--data.history=['1e3', '010', 'true']", "--data.context=['null']"])
    again = parse_yaml(dump_yaml(to_dict(config)), "here", what="The config", todo="")
    assert read_config(again) == read_config(to_dict(config))
    assert again["data"]["target"] == "1e3"
    assert yaml.safe_load(dump_yaml(to_dict(config)))["data"]["history"] == ["1e3", "010", "true"]


@pytest.mark.parametrize(
    ("run_dir", "cache", "told"),
    [
        (".", None, "train.run_dir(.|\n)*|started in"),
        ("/", None, "is or holds the folder that distrag was started in"),
        ("..", None, "is or holds the folder that distrag was started in"),
        ("stores", None, "is or holds the store"),
        ("stores/mine", None, "is or holds the store"),
        ("stores/mine/run", None, "lies in the store"),
        ("link", None, "is or holds the store"),
        ("s3://bucket/run", None, "A folder of this machine"),
        (" ", None, "No run directory"),
        ("runs/a", "http://host/x", "A folder of this machine(.|\n)*data.cache"),
        ("runs/a", "", "A folder of this machine(.|\n)*data.cache"),
    ],
)
def test_a_run_writes_to_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str, cache: str | None, told: str
) -> None:
    (tmp_path / "stores" / "mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "stores")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        read_config({"data": {"path": "stores/mine", "cache": cache}, "train": {"run_dir": run_dir}})
    read_config({"data": {"path": "stores/mine"}, "train": {"run_dir": "stores-of-runs"}})
