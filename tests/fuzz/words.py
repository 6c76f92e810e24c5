"""Bad and good command lines of every command."""

from __future__ import annotations

import os
import random
from pathlib import Path

import yaml

from distrag.config import known_keys
from tests.fuzz.case import Case, Ended, Ground, Room
from tests.fuzz.ground import good_config
from tests.fuzz.values import ODD_YAML, same_meaning, take

NUMBERS = [
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "nan",
        "inf",
        "-inf",
        "1e9",
        "1e400",
        "1.5",
        "",
        " ",
        "x",
        "0x10",
        "1_0",
        "١٢",
        "+3",
        "--3",
        "true",
        "null",
        "1,2",
        "[1]",
    ),
    *(str(10**12), str(2**31), str(2**63), str(2**64), "9" * 60, "9" * 5000, "-0", "1e-9", "０"),
]
TEXTS = [
    "",
    " ",
    "x",
    "..",
    "/",
    "~",
    "é",
    "e\u0301",
    "\u202e",
    "\udcff",
    "a\nb",
    "\x1b[31m",
    "y" * 300,
    "y" * 10_000,
    "-",
    "--",
    "$(id)",
    "%s%n",
    "{}",
    "nowhere",
]


def draw_words(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a command line."""
    how = [_train, _plan, _stats, _evaluate, _report, _prepare, _bench, _any]
    return r.choices(how, [8, 5, 2, 4, 2, 4, 4, 3])[0](r, ground, room)


def _odd_path(r: random.Random, ground: Ground, room: Room) -> str:
    pipe = room.given / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    files = [
        "/dev/null",
        "/dev/zero",
        str(ground.csv),
        str(pipe),
        str(room.here),
        "/proc/self/mem",
        "http://127.0.0.1:9/s",
        "s3://nowhere/s",
    ]
    files += [
        "file:///nowhere",
        "zip://x::file:///nowhere.zip",
        "://",
        "::",
        "x://y",
        "memory://s",
        "\0",
        "data:,x",
        "http://[",
        "file://" + str(ground.store) + "/..",
    ]
    return r.choice([*TEXTS, *files])


def _train(r: random.Random, ground: Ground, room: Room) -> Case:
    path = room.given / "c.yaml"
    tree = good_config(ground.store, room.out / "run")
    import tests.fuzz.values as values

    path.write_text(values.emit_lines(tree))
    words, expect, right, names = ["train", f"--config={path}"], "any", None, ()
    how = r.choice(["value", "value", "value", "key", "form", "path", "list", "pipe", "order"])
    if how == "value":
        key = r.choice([key for key in known_keys() if key not in ("data.path", "train.run_dir", "data.cache")])
        value = r.choice([*NUMBERS, *TEXTS, *ODD_YAML])
        if key in ("train.num_epochs", "train.max_steps") and value.strip("+０").isdigit():
            value = "2"
        words += [f"--{key}={value}"] if r.random() < 0.7 else [f"--{key}", value]
        names, right = (key.split(".")[-1], value.strip() or "empty"), _kept(key, value, room.out / "run")
    elif how == "key":
        word = r.choice(
            [
                "--",
                "---",
                "--=1",
                "--model=",
                "--model.",
                "--.dim=1",
                "--model..dim=1",
                "--MODEL.dim=1",
                "-model.dim=1",
                "--model.dim+=1",
                "--data.history+=item_id",
            ]
        )
        word = r.choice(
            [
                word,
                "--no-debug",
                "--debug=maybe",
                "--config",
                "--config=",
                "--resume=no",
                "--train.resume",
                "--help=x",
                "--print_config=x",
                "--é=1",
                "--\udcff=1",
            ]
        )
        words.append(word)
    elif how == "form":
        more = [
            ["-c", "x"],
            ["train"],
            ["--resume", "true"],
            ["--model.dim", "--model.dim=4"],
            ["--", "x"],
            ["@x"],
            ["model.dim=4"],
            ["--model", str(path)],
        ]
        more += [
            ["--optim", "{lr: 0.1}"],
            ["--optim={lr: .nan}"],
            ["--data.split", str(path)],
            ["--tables.per_table.item_id=row_wise"],
            ["--tables.per_table.item_id"],
        ]
        words += r.choice(more)
    elif how == "path":
        key = r.choice(["data.path", "data.path", "data.cache", "train.run_dir"])
        value = _odd_path(r, ground, room)
        if key != "data.path" and value == str(ground.csv):
            value = "/dev/null"
        if key != "data.path" and not value.startswith("/") and "://" not in value:
            value = str(room.out / value) if value.strip() and value != ".." else ""
        words.append(f"--{key}={value}")
    elif how == "list":
        words.append(
            r.choice(
                [
                    "--train.eval_ks=5",
                    "--train.eval_ks=5,10",
                    "--train.eval_ks=[5 10]",
                    "--train.eval_ks=[5,10",
                    "--data.history=item_id",
                    "--data.history=item_id,shop",
                ]
            )
        )
        words[-1] = r.choice(
            [
                words[-1],
                "--optim.betas=0.9",
                "--optim.betas=(0.9,0.99)",
                "--model.head_hidden=[]",
                "--batching.cost=[1,2,3,4]",
                "--batching.cost=1",
            ]
        )
    elif how == "pipe":
        words = [words[0], f"--config={_pipe_of(path)}"]
        expect, right = "any", _kept("model.dim", "8", room.out / "run")
    else:
        words = ["train", "--model.dim=4", f"--config={path}"] if r.random() < 0.5 else [*words, "--model.dim=4"]
        expect, right = "fine", _kept("model.dim", "8" if words[1] == "--model.dim=4" else "4", room.out / "run")
    return Case("words", f"train {' '.join(words[2:])[:60]}", words, expect=expect, names=names, right=right)  # type: ignore[arg-type]


def _pipe_of(path: Path) -> str:
    """Returns a name for the reading end of a pipe that holds the file's text, as `<(...)` of a shell is."""
    read, write = os.pipe()
    os.write(write, path.read_bytes())
    os.close(write)
    os.set_inheritable(read, True)
    return f"/dev/fd/{read}"


def _kept(key: str, value: str, run: Path):  # type: ignore[no-untyped-def]
    def look(_ended: Ended) -> str:
        if not (run / "config.yaml").exists():
            return ""  # an address of help or of another run directory
        kept = take(yaml.safe_load((run / "config.yaml").read_text()), tuple(key.split(".")))
        try:
            given = yaml.safe_load(value)
        except yaml.YAMLError:
            given = value
        if kept is None or given in (None, "") or same_meaning(given, kept) or same_meaning(value, kept):
            return ""
        return "" if key == "debug" else f"{key} was {value!r}, and {kept!r} was used"

    return look


def _plan(r: random.Random, ground: Ground, room: Room) -> Case:
    path = room.given / "c.yaml"
    import tests.fuzz.values as values

    path.write_text(values.emit_lines(good_config(ground.store, room.out / "run")))
    option = r.choice(["--world-size", "--ranks-per-node", "--epoch", "--planner-seconds", "--max-memory"])
    value = r.choice([*NUMBERS, "0.8", "2GiB", "1KB", "0.0001", "2 GiB", "8%"])
    words = ["plan", str(path), "--planner-seconds=0", f"{option}={value}"]
    if option == "--max-memory" and r.random() < 0.3:
        words.append("--calibrate")
    if r.random() < 0.3:
        words += ["--json"]
    if r.random() < 0.2:
        words[1] = _odd_path(r, ground, room)
    if option == "--planner-seconds":
        value = r.choice(["-1", "nan", "inf", "x", "", "1e-9"])
        words[2:4] = [f"--planner-seconds={value}"]
    return Case("words", f"plan {option}={value[:30]}", words)


def _stats(r: random.Random, ground: Ground, room: Room) -> Case:
    words = ["stats", _odd_path(r, ground, room)]
    if r.random() < 0.3:
        words = ["stats", str(ground.store), r.choice(["--verify=1", "--json=x", "--verif", "extra", "--", "-v", "--json"])]
    return Case("words", " ".join(words)[:60], words)


def _evaluate(r: random.Random, ground: Ground, room: Room) -> Case:
    run = str(ground.run)
    ks = r.choice(NUMBERS)
    words = r.choice(
        [
            ["evaluate", run, "--ks", ks],
            ["evaluate", run, f"--ks={ks}"],
            ["evaluate", run, "--part", r.choice(["train", "", "VALID", "valid"])],
            ["evaluate", run, "--data", _odd_path(r, ground, room)],
            ["evaluate", _odd_path(r, ground, room)],
            ["evaluate", "--popularity", r.choice(["all", "train", "test", ""]), "--data", _odd_path(r, ground, room)],
            ["evaluate", "--popularity", "all", "--data", str(ground.store), "--ks", ks],
            ["evaluate", run, "--popularity", "all"],
            ["evaluate", run, run],
            ["evaluate", "--popularity", "all", "--data", str(ground.store), "--part", "valid"],
            ["evaluate", run, "--ks"],
        ]
    )
    return Case("words", " ".join(words)[:80], words)


def _report(r: random.Random, ground: Ground, room: Room) -> Case:
    words = r.choice([["report", _odd_path(r, ground, room)], ["report"], ["report", str(ground.store)], ["report", str(ground.csv), "x"]])
    return Case("words", " ".join(words)[:60], words)


def _prepare(r: random.Random, ground: Ground, room: Room) -> Case:
    out = str(room.out / "store")
    number = r.choice(NUMBERS)
    odd_out = r.choice(
        [
            "",
            "/dev/null/x",
            str(ground.csv),
            "/proc/x",
            "a" * 300,
            str(room.out / "a" / "b" / "c"),
            str(room.out),
            str(room.out / "\udcff"),
            str(room.out / "é"),
        ]
    )
    words = r.choice(
        [
            [
                "prepare",
                "synthetic",
                "--out",
                out,
                r.choice(["--num-samples", "--num-items", "--seed"]),
                number if number != str(10**12) else "5",
            ],
            ["prepare", str(ground.csv), "--out", odd_out],
            ["prepare", str(ground.csv)],
            ["prepare", "--out", out],
            ["prepare", "ml-100k", "--out", out, "--path", _odd_path(r, ground, room)],
            ["prepare", str(ground.csv), "--out", out, r.choice(["--user", "--item", "--time"]), r.choice([*TEXTS, "price", "item_id"])],
            [
                "prepare",
                str(ground.csv),
                "--out",
                out,
                "--header",
                *r.choice([["a"], ["a", "b", "c", "d"], ["user_id", "item_id", "t", "t"], [""], ["user_id"] * 4]),
            ],
            ["prepare", str(ground.csv), "--out", out, "--schema", _odd_path(r, ground, room)],
            ["prepare", str(ground.csv), str(ground.parquet), "--out", out],
            ["prepare", r.choice([*TEXTS[:-1], "*", "**", "[", "s3://x/y", "http://127.0.0.1:9/x.csv"]), "--out", out],
            ["prepare", str(ground.csv), "--out", out, "--on-unknown", r.choice(["", "error", "x"])],
            ["prepare", str(ground.csv), "--out", out, "--time", "price", "--item", "user_id"],
            ["prepare", "synthetic", str(ground.csv), "--out", out],
        ]
    )
    return Case("words", " ".join(words)[:80], words)


def _bench(r: random.Random, ground: Ground, room: Room) -> Case:
    small = [
        "--rounds=1",
        "--seconds=0.01",
        "--samples=64",
        "--encoders",
        "mean",
        "--batch-sizes",
        "8",
        "--num-items=50",
        "--dim=8",
        "--max-len=10",
        "--num-layers=1",
        "--num-heads=1",
    ]
    number = r.choice(NUMBERS)
    options = [
        "rounds",
        "seconds",
        "samples",
        "num-items",
        "dim",
        "max-len",
        "num-layers",
        "num-heads",
        "dropout",
        "threads",
        "batch-sizes",
    ]
    words = r.choice(
        [
            ["bench", *small, f"--{r.choice(options)}={number if number not in ('1e9', str(10**12)) else '-5'}"],
            ["bench", *small, "--json", r.choice(["/nowhere/x.json", str(room.here), "", str(room.out / "x.json")])],
            ["bench", *small, "--data", _odd_path(r, ground, room)],
            ["bench", "--encoders", "x"],
            [
                "bench",
                "plan-balance",
                "--store",
                _odd_path(r, ground, room),
                "--world-sizes",
                "2",
                "--samples-a-rank",
                "4",
                "--max-steps",
                "2",
                "--lengths",
            ],
            ["bench", "plan-balance", "--store", str(ground.store), "--world-sizes", number, "--samples-a-rank", "4", "--max-steps", "2"],
            ["bench", "plan-speed", "--samples", r.choice(["0", "x", "-1", "nan", "1.5", ""]), "--lengths", "zipf"],
            ["bench", "plan-sped"],
            ["bench", "ranks", "--store", r.choice([str(ground.store), "nowhere"])],
            ["bench", "ranks"],
        ]
    )
    return Case("words", " ".join(words)[:100], words)


def _any(r: random.Random, ground: Ground, room: Room) -> Case:
    command = r.choice(
        [
            "prepare",
            "stats",
            "plan",
            "train",
            "evaluate",
            "report",
            "bench",
            "trian",
            "",
            "-x",
            "--",
            "é",
            "\udcff",
            "Train",
            "doctor",
        ]
    )
    words = [command, *r.choices([*TEXTS[:14], *NUMBERS[:20], "--help", "--json", "--version", "-h"], k=r.randint(0, 3))]
    return Case("words", " ".join(words)[:60], words)
