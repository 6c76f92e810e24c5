"""Bad and good configs for `train` and `plan`."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import yaml

from distrag.config import known_keys
from tests.fuzz.case import Case, Ended, Ground, Room
from tests.fuzz.ground import good_config
from tests.fuzz.values import Raw, emit, emit_lines, leaves, odd, put, same_meaning, take

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


def _case(r: random.Random, told: str, path: Path, room: Room, **more: Any) -> Case:
    plan = r.random() < 0.15
    words = ["plan", str(path), "--planner-seconds=0"] if plan else ["train", "--config", str(path)]
    if plan:
        more["right"] = None
    return Case("config", told, words, **more)


def _wrong_value(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    key = r.choice([k for k in KEYS if k not in (("data", "path"), ("train", "run_dir"), ("data", "cache"))])
    value = odd(r)
    if key in _SLOW and value.isdigit():
        value = Raw("-" + value)
    put(tree, key, value)
    path.write_text(emit_lines(tree), encoding="utf-8", errors="surrogatepass")
    dotted = ".".join(key)
    return _case(r, f"{dotted}: {value[:40]}", path, room, names=(key[-1], path.name), right=_keeps(key, value, room.out / "run"))


def _keeps(key: tuple[str, ...], value: str, run: Path) -> Any:
    """Returns a check that the run's own config holds what was written in the file."""

    def look(_ended: Ended) -> str:
        kept = take(yaml.safe_load((run / "config.yaml").read_text()), key)
        given = yaml.safe_load(f"x: {value}\n")["x"]
        if isinstance(given, str) and given.strip() == "" and kept in ("", None):
            return ""
        if given is None and key[0] in ("encoder", "loss"):
            return ""  # the default of the class
        if kept is None or same_meaning(given, kept):  # None: of another encoder or loss
            return ""
        return "" if key == ("debug",) else f"{'.'.join(key)} was {given!r}, and {kept!r} was used"

    return look


def _unknown_key(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    near = r.choice(
        [
            "max_lenn",
            "Lr",
            "lr ",
            "data.max_len",
            "__class__",
            "class_path",
            "init_args",
            "éncoder",
            "",
            "x" * 3000,
            "config",
            "help",
            "print_config",
        ]
    )
    key: Any = r.choice(
        [near, near, near, Raw("1"), Raw("null"), Raw("true"), Raw("1.5"), Raw("? [1, 2]\n"), Raw("2020-01-01"), Raw("'\\0'"), Raw('"\\0"')]
    )
    section = r.choice([(), *SECTIONS])
    if isinstance(key, Raw) and key.startswith("?"):
        text = emit_lines(tree) + "? [1, 2]\n: 3\n"
    else:
        put(tree, (*section, key), r.choice([1, {}, {"a": 1}, None, "x"]))
        text = emit_lines(tree)
    path.write_text(text, encoding="utf-8")
    if section == ("tables", "per_table") or (key == "data.max_len" and not section):
        return _case(r, f"key {key!r}", path, room)
    return _case(
        r,
        f"unknown key {key[:30]!r} in {'.'.join(section)!r}",
        path,
        room,
        expect="refused",
        names=(str(key)[:20].strip() or path.name, path.name),
    )


def _wrong_shape(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    how = r.choice(["section as value", "value as section", "flat keys", "doubled key", "doubled section", "list for all", "deeper"])
    right, expect, names = None, "refused", (path.name,)
    if how == "section as value":
        section = r.choice(SECTIONS)
        put(tree, section, r.choice([Raw("null"), 3, "gru", [1], [{}], Raw("true"), "", str(path)]))
        names = (section[-1], path.name)
    elif how == "value as section":
        key = r.choice([k for k in KEYS if k != ("tables", "per_table")])
        put(tree, key, r.choice([{"value": 1}, {"a": {"b": 2}}, {"": 1}]))
        names = (key[-1], path.name)
    elif how == "flat keys":
        tree = {".".join(map(str, leaf)): take(tree, leaf) for leaf in leaves(tree)}
        expect = "any"
        right = _keeps(("model", "dim"), "8", room.out / "run")
    elif how == "list for all":
        path.write_text(emit([tree]))
        return _case(r, how, path, room, expect="refused", names=names)
    elif how == "deeper":
        tree = {"config": tree}
    path.write_text(emit_lines(tree))
    if how.startswith("doubled"):
        more = "model: {dim: 16}\n" if how == "doubled section" else "optim: {lr: 0.1, lr: 0.2}\n"
        path.write_text(emit_lines(tree) + more)
        names = ("model", "lr") if how == "doubled key" else ("model",)
    return _case(r, how, path, room, expect=expect, names=names, right=right)  # type: ignore[arg-type]


def _combination(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    changes = r.sample(sorted(GOOD, key=str), r.randint(1, 6))
    told = []
    for key in changes:
        value = r.choice(GOOD[key])
        put(tree, key, value)
        told.append(f"{'.'.join(key)}={value}")
    path.write_text(emit_lines(tree))
    return _case(r, " ".join(told), path, room)


def _deep(kind: str, depth: int) -> str:
    return {"list": "[" * depth + "]" * depth, "map": "{a: " * depth + "1" + "}" * depth, "open": "[" * depth}[kind]


def _laughs(width: int, depth: int) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(lines) + "\n"


def _file(r: random.Random, tree: dict[str, Any], path: Path, room: Room) -> Case:
    """Files that are no config, or a good one in an odd form."""
    good = emit_lines(tree)
    fine = {
        "byte order mark": "\ufeff" + good,
        "windows lines": good.replace("\n", "\r\n"),
        "comments": "# é\n" + good + "# end",
        "anchor": good + "x-none: null\n"
        if False
        else good.replace('"dim": 8', '"dim": &d 8').replace('"num_layers": 1', '"num_layers": 1'),
        "a document mark": "---\n" + good,
    }
    bad = {
        "empty": "",
        "only a comment": "# nothing\n",
        "null": "null\n",
        "two documents": good + "---\n" + good,
        "tabs": good + "optim:\n\tlr: 1\n",
        "not closed": good + "optim: {lr: 1\n",
        "deep list": good + "optim: " + _deep("list", 20_000) + "\n",
        "deep map": good + "optim: " + _deep("map", r.choice([40, 5_000])) + "\n",
        "deep and open": _deep("open", 50_000),
        "many aliases": good + _laughs(10, 9),
        "many aliases in a value": _laughs(10, 9).replace("a8:", "train: {eval_ks:").rstrip() + "}\n",
        "alias to itself": "optim: &o {lr: *o}\n",
        "list of itself": "train: {eval_ks: &k [1, *k]}\n",
        "object": good + "debug: !!python/object/apply:os.system ['touch " + str(room.here / "owned") + "']\n",
        "long line": good + "optim: {lr: " + "1" * 2_000_000 + "}\n",
        "million keys": good + "".join(f"k{i}: {i}\n" for i in range(30_000)),
        "a scalar": "abc\n",
        "a number": "3\n",
        "control characters": good + "optim: {lr: 1}\x07\n",
        "nul": good + "\0",
    }
    raw = {
        "latin-1": good.encode() + b"# \xe9\n",
        "utf-16": good.encode("utf-16"),
        "random bytes": r.randbytes(500),
        "gzip": b"\x1f\x8b" + r.randbytes(100),
        "half of a character": good.encode() + "# é".encode()[:-1],
    }
    special = ["folder", "missing", "pipe", "link to itself", "zeros", "long name", "dangling link", "nul in name", "empty name"]
    kinds = [*fine, *bad, *raw, *special]
    told = r.choice(kinds)
    if told in fine:
        path.write_text(fine[told], newline="")
        return _case(r, told, path, room, expect="fine", right=_keeps(("model", "dim"), "8", room.out / "run"))
    if told in bad:
        path.write_text(bad[told])
    elif told in raw:
        path.write_bytes(raw[told])
    else:
        path = _special(told, path)
    empty = told in ("empty", "only a comment", "null")  # defaults: no length, no store
    return _case(
        r,
        f"file: {told}",
        path,
        room,
        expect="refused",
        names=() if empty or told == "empty name" else ("c.yaml", "y" * 20, "train.eval_ks", "optim"),
    )


def _special(told: str, path: Path) -> Path:
    if told == "folder":
        path.mkdir()
    elif told == "pipe":
        os.mkfifo(path)
    elif told == "link to itself":
        path.symlink_to(path)
    elif told == "zeros":
        path.symlink_to("/dev/zero")
    elif told == "dangling link":
        path.symlink_to("nowhere")
    elif told == "long name":
        return path.with_name("y" * 300)
    elif told == "nul in name":
        return Path(str(path) + "\0")
    elif told == "empty name":
        return Path("")
    return path


def copy_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy that may be changed."""
    return copy.deepcopy(tree)
