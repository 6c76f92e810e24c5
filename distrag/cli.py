"""The command line: `distrag prepare | stats | plan | verify | train | evaluate | bench | export | report`.

Every command imports what it needs when it runs, so that `distrag --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

COMMANDS = {
    "prepare": "files of histories or events -> a store",
    "stats": "lengths, padding, cuts and vocabularies of a store",
    "plan": "the steps, balance and placement of a config, without training",
    "verify": "whether a config trains the same on several numbers of ranks",
    "train": "a config -> a trained, evaluated model in a run directory",
    "evaluate": "the metrics of a run, or of ranking by popularity",
    "bench": "this machine -> ratios against the padded way of working; how even and how quick plans are",
    "export": "a run -> one file of weights that plain modules load",
    "report": "a run directory -> one page",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a fault of input ends in one clear message and exit code 2, with `--debug` in its traceback.

    Ctrl-C ends it with 130 and SIGTERM with 143; `train` saves first, and then ends with 130 or 75.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    if words[0] == "--version":
        from distrag import __version__

        print(__version__)
        return
    command = _command(words[0])
    with _stoppable(75 if words[0] == "train" else 143) as stopped:
        try:
            command(words[1:])
        except Exception as error:
            if stopped:  # an import that is interrupted may make another error of it
                raise SystemExit(stopped[0]) from None
            _fail(words, error)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except SystemExit as end:
            if said := getattr(end, "said", ""):
                print(f"distrag {words[0]}: {said}", file=sys.stderr)
            raise


def run() -> None:
    """Is the process of the command line: does what `main` does, and leaves at once where it failed.

    Taking torch down lasts seconds, in which the other ranks of a failed run would wait for this one.
    """
    try:
        main()
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not code:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _fail(words: Sequence[str], error: Exception) -> NoReturn:
    """Ends the process as an error of a command asks for."""
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone, as `head` does
        sys.stdout = None
        raise SystemExit(141) from None
    from distrag.leaving import RanksFailed

    is_lost = isinstance(error, RanksFailed)
    if _debugs(words) or not (is_lost or isinstance(error, ValueError)):
        raise error
    print(f"distrag {words[0]}: {error}", file=sys.stderr)
    raise SystemExit(1 if is_lost else 2) from None


@contextmanager
def _stoppable(code: int) -> Iterator[list[int]]:
    """Makes Ctrl-C and SIGTERM end the block in order, and a second Ctrl-C end the process at once.

    Args:
        code: the exit code after a SIGTERM; after Ctrl-C it is 130.

    Returns:
        The exit code, once there is one.
    """
    stopped: list[int] = []

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stopped.append(130 if number == signal.SIGINT else code)
        if len(stopped) == 1:
            raise SystemExit(stopped[0])

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    changed = [number for number, old in former.items() if old in (signal.SIG_DFL, signal.default_int_handler)]
    changed = changed if threading.current_thread() is threading.main_thread() else []
    for number in changed:
        signal.signal(number, end)
    try:
        yield stopped
    finally:
        for number in changed:
            if not stopped:  # else the process ends, and another Ctrl-C should not meet Python's own handler
                signal.signal(number, former[number])


def _debugs(words: Sequence[str]) -> bool:
    return any(word in ("--debug", "--debug=true") for word in words)


def _full(words: Sequence[str]) -> list[str]:
    """Returns the words with a bare `--debug` or `--resume` as the config's parser wants it, which asks every key for a value."""
    followed = [word == "--debug" and after in ("true", "false") for word, after in zip(words, [*words[1:], ""], strict=False)]
    bare = {"--debug": "--debug=true", "--resume": "--train.resume=true"}
    return [word if has_value else bare.get(word, word) for word, has_value in zip(words, followed, strict=True)]


def _help() -> str:
    lines = "\n".join(f"  {name:9} {what}" for name, what in COMMANDS.items())
    return f"usage: distrag COMMAND ...\n\ncommands:\n{lines}\n\n`distrag COMMAND --help` tells what a command takes."


def _command(name: str) -> Callable[[list[str]], None]:
    import difflib

    known: dict[str, Callable[[list[str]], None]] = {key: globals()[f"_{key}"] for key in COMMANDS}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"distrag: no command {name!r}{hint}\n\n{_help()}", file=sys.stderr)
        raise SystemExit(2)
    return known[name]


def _parser(name: str, what: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"distrag {name}", description=what or COMMANDS[name], allow_abbrev=False)


def _prepare(words: list[str]) -> None:
    parser = _parser("prepare")
    parser.add_argument("source", nargs="+", help="Parquet or CSV files, folders, globs; a schema YAML; ml-100k; synthetic")
    parser.add_argument("--out", required=True, help="folder of the store")
    parser.add_argument("--schema", help="YAML that names features; what it does not say is inferred")
    parser.add_argument("--on-unknown", choices=("count", "error"), default="count", help="bad ids: row 0 and counted, or refused")
    parser.add_argument("--user", help="column of the user in a CSV of events")
    parser.add_argument("--item", help="column of the item in a CSV of events")
    parser.add_argument("--time", help="column of the time in a CSV of events")
    parser.add_argument("--header", nargs="+", help="names of the columns of a CSV without a header line")
    parser.add_argument("--overwrite", action="store_true", help="replace another store at --out")
    parser.add_argument("--path", help="ml-100k: folder or file that has it; otherwise it is fetched")
    parser.add_argument("--num-samples", type=int, help="synthetic: rows")
    parser.add_argument("--num-items", type=int, help="synthetic: items")
    parser.add_argument("--seed", type=int, help="synthetic: seed")
    args = parser.parse_args(words)
    from distrag.data.prepare import prepare
    from distrag.data.sources import MovieLensConfig, SyntheticConfig

    made = {"num_samples": args.num_samples, "num_items": args.num_items, "seed": args.seed}
    schema = prepare(
        args.source[0] if len(args.source) == 1 else args.source,
        args.out,
        schema=args.schema,
        overwrite=args.overwrite,
        on_unknown=args.on_unknown,
        user=args.user,
        item=args.item,
        time=args.time,
        header=args.header,
        ml_100k=MovieLensConfig(path=args.path) if args.path else None,
        synthetic=SyntheticConfig(**{key: value for key, value in made.items() if value is not None}),
    )
    tables = ", ".join(f"{table.name} ({table.num_rows:,} rows)" for table in schema.tables)
    print(f"{args.out}: {schema.num_samples:,} samples, {schema.num_positions:,} positions; hash {schema.content_hash[:12]}")
    print(
        f"tables: {tables or 'none, so there is nothing to rank: a column of floats is read as numbers, unless a schema says `kind: id`'}"
    )
    odd = [
        f"{f.name} {f.num_unknown:,} unknown, {f.num_null:,} null"
        for f in (*schema.history, *schema.context)
        if f.num_unknown or f.num_null
    ]
    if odd:
        print("unknown ids are row 0, null numbers the mean, null times the time before: " + "; ".join(odd))


def _stats(words: list[str]) -> None:
    parser = _parser("stats")
    parser.add_argument("store", help="folder that `distrag prepare` wrote")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare it with the content hash first")
    args = parser.parse_args(words)
    from distrag.data.profile import stats
    from distrag.data.store import open_store

    if args.verify:
        open_store(args.store, verify=True)
    stats(args.store, json=args.json)


BENCHES = {
    "": "whole training steps against the padded way of working",
    "plan-balance": "how even planned steps are over the ranks, beside a random deal and balancing after loading",
    "plan-speed": "seconds and memory of planning an epoch, beside other samplers",
    "safety": "what the checks of a training step cost",
    "saving": "how long a save holds up training, written in its way and beside it",
    "ranks": "under torchrun: the ranks' measured imbalance, by the plan and by a plain DistributedSampler",
}


def _bench(words: list[str]) -> None:
    which = words[0] if words and words[0] in BENCHES else ""
    parser = _parser(f"bench {which}".strip(), BENCHES[which])
    name = {"": "command", "plan-balance": "balance", "plan-speed": "speed"}.get(which, which)
    bench: Callable[[argparse.ArgumentParser, list[str]], object] = importlib.import_module(f"distrag.bench.{name}").bench
    if not which:
        parser.epilog = "Other benches: " + "; ".join(f"`distrag bench {name}`, {what}" for name, what in BENCHES.items() if name) + "."
    bench(parser, words[1:] if which else words)


def _export(words: list[str]) -> None:
    parser = _parser("export")
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--out", required=True, metavar="FILE.safetensors", help="the file; a former one is replaced")
    parser.add_argument(
        "--checkpoint", choices=("best", "last", "refit"), default="", help="otherwise what was tested: the refit, or the best without one"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    from distrag.export.write import export_run

    told = export_run(args.run, args.out, args.checkpoint)
    if args.json:
        print(json.dumps(told))
    else:
        print(f"{told['file']}: {told['parameters']:,} parameters, {told['bytes']:,} bytes, of step {told['step']} ({told['checkpoint']})")


def _report(words: list[str]) -> None:
    parser = _parser("report")
    parser.add_argument("run", help="a run directory")
    args = parser.parse_args(words)
    from distrag.report.page import write_report

    print(write_report(args.run))


def _train(words: list[str]) -> None:
    from distrag.config import build_parser, read_config

    if "-h" in words or "--help" in words:
        build_parser().print_help()
        return
    config = read_config(_full(words))
    from distrag.training.loop import train

    train(config)


def _plan(words: list[str]) -> None:
    parser = _parser("plan")
    parser.add_argument("config", help="YAML of a run")
    parser.add_argument("--world-size", type=int, default=1, help="ranks to plan for")
    parser.add_argument("--ranks-per-node", type=int, help="ranks of a node; otherwise 8, or all where there are fewer")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--planner-seconds", type=float, default=15.0, help="what TorchRec's planner may take; 0 does not ask it")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--calibrate", action="store_true", help="time training steps here, fit the cost, write cost.json into train.run_dir"
    )
    instead.add_argument(
        "--max-memory", metavar="SHARE|SIZE", help="find the largest token budget under 0.8 of the memory, or under 2GiB, by trial steps"
    )
    args, overrides = parser.parse_known_args(words)
    from distrag.config import read_config

    config = read_config(["--config", args.config, *_full(overrides)])
    describe: Callable[[dict[str, Any]], str]
    if args.calibrate:
        from distrag.training.calibrate import calibrate
        from distrag.training.calibrate import describe_calibration as describe

        numbers = calibrate(config, args.world_size)
    elif args.max_memory is not None:
        from distrag.training.memory import describe_memory as describe
        from distrag.training.memory import plan_memory

        numbers = plan_memory(config, args.world_size, args.max_memory)
    else:
        from distrag.training.plan import plan_run
        from distrag.training.plan_text import describe_plan as describe

        numbers = plan_run(config, args.world_size, args.epoch, ranks_per_node=args.ranks_per_node, planner_s=args.planner_seconds)
    print(json.dumps(numbers, indent=1) if args.json else describe(numbers))


def _verify(words: list[str]) -> None:
    parser = _parser("verify")
    parser.add_argument("config", help="YAML of a run")
    parser.add_argument("--world-sizes", default="1,2", metavar="1,2,...", help="numbers of ranks, started here; 1 is always among them")
    parser.add_argument("--steps", type=int, default=20, help="global steps to train")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference that is still equal")
    parser.add_argument("--json", action="store_true")
    args, overrides = parser.parse_known_args(words)
    from distrag.config import read_config
    from distrag.training.verify import verify
    from distrag.training.verify_text import describe_verify, verify_json

    config = read_config(["--config", args.config, *_full(overrides)])
    numbers = verify(config, _sizes(args.world_sizes), steps=args.steps, tolerance=args.tolerance)
    print(verify_json(numbers) if args.json else describe_verify(numbers))
    if not numbers["exact"]:
        raise SystemExit(1)


def _sizes(text: str) -> list[int]:
    from distrag.problem import problem

    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        todo = "name numbers of ranks, with commas between them"
        raise problem("Not a list of numbers", got=text, wanted="such as 1,2,4", where="--world-sizes", todo=todo) from None


def _evaluate(words: list[str]) -> None:
    parser = _parser("evaluate")
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--part", choices=("valid", "test"), default="test", help="what the run is scored on")
    parser.add_argument(
        "--popularity", choices=("all", "train"), help="rank by popularity instead of by a model: counted over all events, or train only"
    )
    parser.add_argument("--data", help="the store; a run has its own, and takes another with the same vocabularies")
    parser.add_argument("--ks", type=int, nargs="+", help="cut-offs of HR, NDCG and MRR; otherwise the run's own, or 5 10 20")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    from distrag.problem import problem

    if args.popularity and args.data and not args.run:
        metrics, rank = _popularity(args)
    elif args.run and not args.popularity:
        from distrag.training.evaluate_run import evaluate_run

        metrics, rank = evaluate_run(args.run, args.part, args.data, args.ks)
    else:
        wanted = "`distrag evaluate RUN` or `distrag evaluate --popularity all --data STORE`"
        raise problem(
            "Nothing to evaluate",
            got=" ".join(words) or "no arguments",
            wanted=wanted,
            where="the command line",
            todo="give one of the two",
        )
    if rank == 0:
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in metrics.items()}
        print(json.dumps(rounded) if args.json else "\n".join(f"{key:24} {value}" for key, value in rounded.items()))


def _popularity(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distrag.config import check_ks
    from distrag.data.checks import check_values
    from distrag.data.store import open_store
    from distrag.evaluate import evaluate_popularity
    from distrag.world import agreed, open_world

    ks = [5, 10, 20] if args.ks is None else args.ks
    check_ks(ks, "--ks")
    with open_world("cpu") as world:
        store = agreed(world, lambda: open_store(args.data))
        agreed(world, lambda: check_values(store, world.rank, world.size))
        return evaluate_popularity(store, world, args.popularity, ks), world.rank
