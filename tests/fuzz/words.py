"""Bad and good command lines of every command."""

from __future__ import annotations

import os
import random
from pathlib import Path

import yaml

from distrag.config import known_keys
from tests.fuzz.case import Case, Ended, Ground, Right, Room
from tests.fuzz.ground import good_config
from tests.fuzz.values import ODD_YAML, each, emit_lines, same_meaning, take
from tests.fuzz.words_bench import draw_bench

NUMBERS = [
    *each("0 -1 1 2 3 nan inf -inf 1e9 1e400 1.5 x 0x10 1_0 +3 --3 true null 1,2 [1] -0 1e-9 ١٢"),
    *("", " ", str(10**12), str(2**31), str(2**63), str(2**64), "9" * 60, "9" * 5000),
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
]
ADDRESSES = "http://127.0.0.1:9/s s3://nowhere/s file:///nowhere zip://x::file:///nowhere.zip :// :: x://y memory://s data:,x http://[ http://127.0.0.1:9/s?a=b"
DEVICES = "/dev/null /dev/zero /proc/self/mem"
KEYS = [key for key in known_keys() if key not in ("data.path", "train.run_dir", "data.cache")]
FORMS = each(
    "-- --- --=1 --model= --model. --.dim=1 --model..dim=1 --MODEL.dim=1 -model.dim=1 --model.dim+=1 --data.history+=item_id --no-debug "
    "--debug=maybe --config --config= --resume=no --train.resume --help=x --print_config=x --é=1 --\udcff=1 --train.eval_ks=5 "
    "--train.eval_ks=5,10 --train.eval_ks=[5,10 --data.history=item_id --data.history=item_id,shop --optim.betas=0.9 "
    "--optim.betas=(0.9,0.99) --model.head_hidden=[] --batching.cost=[1,2,3,4] --batching.cost=1 --tables.per_table.item_id=row_wise "
    "--tables.per_table.item_id --optim={lr:.nan} --optim={lr:0.1} --model=FILE --data.split=FILE train @x model.dim=4"
)


def draw_words(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a command line."""
    how = [_value, _form, _path, _order, _plan, _stats, _evaluate, _report, _prepare, _any]
    if r.random() < 0.12:
        return draw_bench(r, ground, r.choice(NUMBERS), odd_path(r, ground, room), room)
    return r.choices(how, [5, 3, 3, 1, 5, 2, 4, 2, 5, 3])[0](r, ground, room)


def odd_path(r: random.Random, ground: Ground, room: Room) -> str:
    """Returns a path or an address of something that is no store, run or config."""
    pipe = room.given / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    there = [str(ground.csv), str(pipe), str(room.here), f"file://{ground.store}/.."]
    return r.choice([*TEXTS, *ADDRESSES.split(), *DEVICES.split(), *there, "\0"])


def _config(ground: Ground, room: Room) -> Path:
    path = room.given / "c.yaml"
    path.write_text(emit_lines(good_config(ground.store, room.out / "run")))
    return path


def _train(told: str, words: list[str], room: Room, right: Right | None = None, names: tuple[str, ...] = (), *, fine: bool = False) -> Case:
    return Case("words", f"train {told[:70]}", ["train", *words], "fine" if fine else "any", names, right)


def _value(r: random.Random, ground: Ground, room: Room) -> Case:
    """Any word as the value of any key."""
    key, value = r.choice(KEYS), r.choice([*NUMBERS, *TEXTS, *ODD_YAML])
    if key in ("train.num_epochs", "train.max_steps") and value.strip("+").isdigit():
        value = "2"  # a long run is no bad one
    words = [f"--{key}={value}"] if r.random() < 0.7 else [f"--{key}", value]
    right, names = _kept(key, value, room.out / "run"), (key.split(".")[-1], value.strip() or "empty")
    return _train(" ".join(words), [f"--config={_config(ground, room)}", *words], room, right, names)


def _form(r: random.Random, ground: Ground, room: Room) -> Case:
    """Words in odd forms."""
    path = _config(ground, room)
    words = r.choice(
        [[r.choice(FORMS)], ["-c", "x"], ["--resume", "true"], ["--model.dim", "--model.dim=4"], ["--", "x"], ["--optim", "{lr: 0.1}"]]
    )
    return _train(" ".join(words), [f"--config={path}", *(word.replace("FILE", str(path)) for word in words)], room)


def _path(r: random.Random, ground: Ground, room: Room) -> Case:
    """Paths that are none."""
    key, value = r.choice(["data.path", "data.path", "data.cache", "train.run_dir"]), odd_path(r, ground, room)
    if key != "data.path":
        value = "/dev/null" if value == str(ground.csv) else value
        if not value.startswith("/") and "://" not in value:
            value = str(room.out / value) if value.strip() and value != ".." else ""
    return _train(f"--{key}={value}", [f"--config={_config(ground, room)}", f"--{key}={value}"], room)


def _order(r: random.Random, ground: Ground, room: Room) -> Case:
    """The later word wins, file or not; a config may be a pipe."""
    path, run = _config(ground, room), room.out / "run"
    how = r.choice(["word first", "word last", "twice", "pipe"])
    file = f"--config={_pipe_of(path) if how == 'pipe' else path}"
    words = {"word first": ["--model.dim=4", file], "word last": [file, "--model.dim=4"], "twice": [file, "--model.dim=4", file]}.get(
        how, [file]
    )
    # A pipe can be read by the process that holds it: here it is this one.
    return _train(how, words, room, _kept("model.dim", "4" if how == "word last" else "8", run), fine=how != "pipe")


def _pipe_of(path: Path) -> str:
    """Returns a name for the reading end of a pipe that holds the file's text, as `<(...)` of a shell is."""
    read, write = os.pipe()
    os.write(write, path.read_bytes())
    os.close(write)
    os.set_inheritable(read, True)
    return f"/dev/fd/{read}"


def _kept(key: str, value: str, run: Path) -> Right:
    """Returns a check that the run's own config holds the value that was given."""

    def look(_ended: Ended) -> str:
        if not (run / "config.yaml").exists():
            return ""
        kept = take(yaml.safe_load((run / "config.yaml").read_text()), tuple(key.split(".")))
        try:
            given = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            given = value
        if kept is None or given in (None, "") or same_meaning(given, kept) or same_meaning(value, kept):
            return ""
        return f"{key} was {value!r}, and {kept!r} was used"

    return look


def _plan(r: random.Random, ground: Ground, room: Room) -> Case:
    option = r.choice(["--world-size", "--ranks-per-node", "--epoch", "--planner-seconds", "--max-memory"])
    value = r.choice([*NUMBERS, "0.8", "2GiB", "1KB", "0.0001", "2 GiB", "8%"])
    if option == "--planner-seconds":
        value = r.choice(["-1", "nan", "inf", "x", "", "1e-9"])
    words = ["plan", str(_config(ground, room)), *(["--planner-seconds=0"] if option != "--planner-seconds" else []), f"{option}={value}"]
    if option == "--max-memory" and r.random() < 0.3:
        words.append("--calibrate")
    if r.random() < 0.2:
        words[1] = odd_path(r, ground, room)
    return Case("words", f"plan {option}={value[:30]}", [*words, *(["--json"] if r.random() < 0.3 else [])])


def _stats(r: random.Random, ground: Ground, room: Room) -> Case:
    words = [str(ground.store), r.choice(["--verify=1", "--json=x", "--verif", "extra", "--", "-v", "--json"])]
    words = ["stats", *words] if r.random() < 0.3 else ["stats", odd_path(r, ground, room)]
    return Case("words", " ".join(words)[:60], words)


def _evaluate(r: random.Random, ground: Ground, room: Room) -> Case:
    run, odd, popular = str(ground.run), odd_path(r, ground, room), ["--popularity", "all", "--data", str(ground.store)]
    ks = r.choice(NUMBERS)
    words = r.choice(
        [
            *([run, "--ks", ks], [run, f"--ks={ks}"], [*popular, "--ks", ks], [run, "--ks"], [run, "--data", odd], [odd]),
            *([run, "--part", r.choice(["train", "", "VALID", "valid"])], [run, "--popularity", "all"], [run, run]),
            *(["--popularity", r.choice(["all", "train", "test", ""]), "--data", odd], [*popular, "--part", "valid"]),
        ]
    )
    return Case("words", f"evaluate {' '.join(words)[:70]}", ["evaluate", *words])


def _report(r: random.Random, ground: Ground, room: Room) -> Case:
    words = r.choice([[odd_path(r, ground, room)], [], [str(ground.store)], [str(ground.csv), "x"]])
    return Case("words", f"report {' '.join(words)[:60]}", ["report", *words])


def _prepare(r: random.Random, ground: Ground, room: Room) -> Case:
    out, csv, odd = ["--out", str(room.out / "store")], str(ground.csv), odd_path(r, ground, room)
    number = r.choice([number for number in NUMBERS if number not in ("1e9", str(10**12))])
    outs = [
        "",
        "/dev/null/x",
        csv,
        "/proc/x",
        "a" * 300,
        str(room.out / "a" / "b"),
        str(room.out),
        str(room.out / "\udcff"),
        str(room.out / "é"),
    ]
    header = r.choice([["a"], ["a", "b", "c", "d"], ["user_id", "item_id", "t", "t"], [""], ["user_id"] * 4])
    sources = [*TEXTS, "*", "**", "[", "s3://x/y", "http://127.0.0.1:9/x.csv"]
    words = r.choice(
        [
            *(["synthetic", *out, f"--{r.choice(['num-samples', 'num-items', 'seed'])}", number], ["synthetic", csv, *out]),
            *([csv, "--out", r.choice(outs)], [csv], out, ["ml-100k", *out, "--path", odd], [csv, str(ground.parquet), *out]),
            *(
                [csv, *out, r.choice(["--user", "--item", "--time"]), r.choice([*TEXTS, "price", "item_id"])],
                [csv, *out, "--header", *header],
            ),
            *([csv, *out, "--schema", odd], [r.choice(sources), *out], [csv, *out, "--on-unknown", r.choice(["", "error", "x"])]),
            [csv, *out, "--time", "price", "--item", "user_id"],
        ]
    )
    return Case("words", f"prepare {' '.join(words)[:80]}", ["prepare", *words])


def _any(r: random.Random, ground: Ground, room: Room) -> Case:
    """Words in no order."""
    command = r.choice(
        ["prepare", "stats", "plan", "train", "evaluate", "report", "trian", "", "-x", "--", "é", "\udcff", "Train", "doctor"]
    )
    words = [command, *r.choices([*TEXTS[:14], *NUMBERS[:20], "--help", "--json", "--version", "-h"], k=r.randint(0, 3))]
    return Case("words", " ".join(words)[:60], words)
