"""Bad and good configs for `train` and `plan`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from distrag.config import known_keys
from tests.fuzz.case import Case, Ended, Expect, Ground, Right, Room
from tests.fuzz.config_files import write_file
from tests.fuzz.ground import good_config
from tests.fuzz.values import Raw, each, emit, emit_lines, leaves, odd, put, same_meaning, take

KEYS = [tuple(key.split(".")) for key in known_keys()]
SECTIONS = sorted({key[:-1] for key in KEYS if len(key) > 1})
_SLOW = (("train", "max_steps"), ("train", "num_epochs"))
"""Keys whose large values are good and train for long."""
GOOD: dict[tuple[str, ...], list[Any]] = {
    ("data", "truncate"): ["newest", "oldest", "random_window", "stochastic"],
    ("data", "max_len"): [1, 2, 5, 12],
    ("data", "mean_cost_share"): [1.0, 0.99, 0.5, 0.1, 0.001],
    ("data", "split", "kind"): ["leave_one_out", "time", "row"],
    ("data", "split", "valid_share"): [0.0, 0.5, 1.0, 0.3],
    ("data", "split", "test_share"): [0.0, 0.5, 1.0, 0.3],
    ("data", "split", "column"): ["timestamp", "price", "nothing"],
    ("data", "history"): [["item_id"], ["price"], ["item_id", "shop"], ["shop", "item_id", "timestamp", "price"], ["city"], []],
    ("data", "context"): [[], ["city"], ["age"], ["age", "city"], ["item_id"]],
    ("data", "target"): ["item_id", "shop", "price", "city"],
    ("data", "on_unknown"): ["count", "error"],
    ("batching", "max_tokens"): [12, 50, 5000, None],
    ("batching", "global_tokens"): [12, 50, 5000, None],
    ("batching", "max_samples"): [1, 3, None],
    ("batching", "bucket_steps"): [1, 4, 100],
    ("batching", "locality"): ["global", "node"],
    ("batching", "cost"): [None, [1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 2]],
    ("batching", "prefetch"): [0, 1, 8],
    ("model", "dim"): [1, 4, 6, 8, 16],
    ("model", "join"): ["sum", "concat"],
    ("model", "head_hidden"): [[], [4], [4, 4]],
    ("encoder", "name"): ["sasrec", "gru", "mean", "sum", "max", "self_attention", "sasrek", ""],
    ("encoder", "num_layers"): [1, 2, 3],
    ("encoder", "num_heads"): [1, 2, 3],
    ("encoder", "dropout"): [0.0, 0.9],
    ("loss", "name"): ["", "sampled_softmax", "full_softmax", "bce", "binary"],
    ("loss", "num_negatives"): [1, 7],
    ("tables", "shard_rows"): [0, 1, 20, 10**6],
    ("tables", "sharding"): ["row_wise", "table_wise", "column_wise", "replicated"],
    ("tables", "per_table"): [{}, {"item_id": "replicated"}, {"shop": "row_wise"}, {"nothing": "row_wise"}, {"item_id": "sideways"}],
    ("tables", "optimizer"): ["rowwise_adagrad", "adagrad", "sgd", "adam"],
    ("tables", "replicated_optimizer"): ["adam", "adagrad", "sgd"],
    ("tables", "cpu_kernel"): ["numba", "fbgemm"],
    ("tables", "max_gib_per_rank"): [0.0, 1e-9, 1.0],
    ("optim", "schedule"): ["constant", "cosine"],
    ("optim", "warmup_steps"): [0, 1, 1000],
    ("optim", "clip_norm"): [0.0, 1e-9, 1.0],
    ("train", "eval_ks"): [[1], [5, 10], [1000], []],
    ("train", "metric"): ["", "ndcg@5", "ndcg@10", "auc", "log_loss"],
    ("train", "patience"): [0, 1],
    ("train", "refit"): [True, False],
    ("train", "precision"): ["fp32", "bf16"],
    ("train", "device"): ["cpu", "auto", "cuda"],
    ("train", "save_every"): [0, 1],
    ("train", "log_samples"): [True],
    ("train", "tensorboard"): [True, False],
    ("task",): ["next_item", "conversion"],
    ("debug",): [True, False],
}
"""Values that are sound alone; together many of them are not."""


def draw_config(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a config file."""
    path = room.given / "c.yaml"
    tree = good_config(ground.store, room.out / "run", task=r.choice(["next_item", "next_item", "conversion"]))
    how = r.choices([_wrong_value, _unknown_key, _wrong_shape, _combination, _file], [9, 3, 3, 6, 5])[0]
    return how(r, tree, path, room)


def _case(r: random.Random, told: str, path: Path, expect: Expect = "any", names: tuple[str, ...] = (), right: Right | None = None) -> Case:
    if r.random() < 0.15:
        return Case("config", told, ["plan", str(path), "--planner-seconds=0"], expect, names)
    return Case("config", told, ["train", "--config", str(path)], expect, names, right)


def _wrong_value(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    key, value = r.choice([k for k in KEYS if k not in (("data", "path"), ("train", "run_dir"), ("data", "cache"))]), odd(r)
    if key in _SLOW and value.isdigit():
        value = Raw("-" + value)
    put(tree, key, value)
    path.write_text(emit_lines(tree), encoding="utf-8", errors="surrogatepass")
    return _case(r, f"{'.'.join(key)}: {value[:40]}", path, "any", (key[-1], path.name), _keeps(key, value, room.out / "run"))


def _keeps(key: tuple[str, ...], value: str, run: Path) -> Any:
    """Returns a check that the run's own config holds what was written in the file."""

    def look(_ended: Ended) -> str:
        kept = take(yaml.safe_load((run / "config.yaml").read_text()), key)
        try:
            given = yaml.safe_load(f"x: {value}\n")["x"]
        except ValueError:  # a date that is none is a text
            given = value
        if isinstance(given, str) and given.strip() == "" and kept in ("", None):
            return ""
        if given is None and key[0] in ("encoder", "loss"):
            return ""  # the default of the class
        if kept is None or same_meaning(given, kept):  # None: of another encoder or loss
            return ""
        return "" if key == ("debug",) else f"{'.'.join(key)} was {given!r}, and {kept!r} was used"

    return look


NEAR = each("max_lenn Lr data.max_len __class__ class_path init_args éncoder config help print_config")
NO_TEXT = [Raw(text) for text in ("1", "null", "true", "1.5", "2020-01-01", "'\\0'", '"\\0"')]


def _unknown_key(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    if r.random() < 0.05:
        path.write_text(emit_lines(tree) + "? [1, 2]\n: 3\n")
        return _case(r, "a list as key", path, "refused", (path.name,))
    key, section = r.choice([*NEAR, "", "lr ", "x" * 3000, *NO_TEXT]), r.choice([(), *SECTIONS])
    put(tree, (*section, key), r.choice([1, {}, {"a": 1}, None, "x"]))
    path.write_text(emit_lines(tree), encoding="utf-8")
    told = f"unknown key {key[:30]!r} in {'.'.join(section)!r}"
    if section == ("tables", "per_table") or (key == "data.max_len" and not section):
        return _case(r, told, path)
    return _case(r, told, path, "refused", (key[:20].strip() or path.name, path.name))


def _wrong_shape(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    how = r.choice(["section as value", "value as section", "flat keys", "doubled key", "doubled section", "list for all", "deeper"])
    names: tuple[str, ...] = (path.name,)
    if how == "section as value":
        section = r.choice(SECTIONS)
        put(tree, section, r.choice([Raw("null"), 3, "gru", [1], [{}], Raw("true"), "", str(path)]))
    elif how == "value as section":
        put(tree, r.choice([k for k in KEYS if k != ("tables", "per_table")]), r.choice([{"value": 1}, {"a": {"b": 2}}, {"": 1}]))
    elif how == "flat keys":
        path.write_text(emit_lines({".".join(leaf): take(tree, leaf) for leaf in leaves(tree)}))
        return _case(r, how, path, "fine", right=_keeps(("model", "dim"), "8", room.out / "run"))
    more = {"doubled section": "model: {dim: 16}\n", "doubled key": "optim: {lr: 0.1, lr: 0.2}\n"}.get(how, "")
    path.write_text({"list for all": emit([tree]), "deeper": emit_lines({"config": tree})}.get(how, emit_lines(tree)) + more)
    return _case(r, how, path, "refused", names)


def _combination(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    told = []
    for key in r.sample(sorted(GOOD, key=str), r.randint(1, 6)):
        value = r.choice(GOOD[key])
        put(tree, key, value)
        told.append(f"{'.'.join(key)}={value}")
    path.write_text(emit_lines(tree))
    return _case(r, " ".join(told), path)


def _file(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    told, path, good = write_file(r, emit_lines(tree), path)
    if good:
        return _case(r, f"file: {told}", path, "fine", right=_keeps(("model", "dim"), "8", room.out / "run"))
    # Of a file that says nothing all is default; what is missing first is then told by its key.
    blank = told in ("empty", "only a comment", "null", "empty name")
    return _case(r, f"file: {told}", path, "refused", () if blank else ("c.yaml", "y" * 20))
