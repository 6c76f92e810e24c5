"""The command line: `distrag prepare | stats | plan | train | evaluate | bench | report`.

Every command imports what it needs when it runs, so that `distrag --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

COMMANDS = {
    "prepare": "files of histories or events -> a store",
    "stats": "lengths, padding, cuts and vocabularies of a store",
    "plan": "the steps, balance and placement of a config, without training",
    "train": "a config -> a trained, evaluated model in a run directory",
    "evaluate": "the metrics of a run, or of ranking by popularity",
    "bench": "this machine -> ratios against the padded way of working",
    "report": "a run directory -> one page",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a fault of input ends in one clear message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    if words[0] == "--version":
        from distrag import __version__

        print(__version__)
        return
    command = _command(words[0])
    try:
        command(words[1:])
    except ValueError as error:
        print(f"distrag {words[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from (error if "--debug" in words else None)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


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


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"distrag {name}", description=COMMANDS[name], allow_abbrev=False)


def _train(words: list[str]) -> None:
    from distrag.config import build_parser, read_config

    if "-h" in words or "--help" in words:
        build_parser().print_help()
        return
    words = ["--debug=true" if word == "--debug" else word for word in words]
    config = read_config(words)
    from distrag.training.loop import train

    train(config)


def _plan(words: list[str]) -> None:
    parser = _parser("plan")
    parser.add_argument("config", help="YAML of a run")
    parser.add_argument("--world-size", type=int, default=1, help="ranks to plan for")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args, overrides = parser.parse_known_args(words)
    from distrag.config import read_config
    from distrag.training.plan import describe_plan, plan_run

    numbers = plan_run(read_config(["--config", args.config, *overrides]), args.world_size, args.epoch)
    print(json.dumps(numbers, indent=1) if args.json else describe_plan(numbers))


def _evaluate(words: list[str]) -> None:
    parser = _parser("evaluate")
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--part", choices=("valid", "test"), default="test")
    parser.add_argument(
        "--popularity", choices=("all", "train"), help="rank by popularity instead of by a model: counted over all events, or train only"
    )
    parser.add_argument("--data", help="the store, with --popularity; otherwise the run's own")
    parser.add_argument("--ks", type=int, nargs="+", default=[5, 10, 20], help="cut-offs, with --popularity")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    from distrag.problem import problem

    if args.popularity and args.data:
        metrics, rank = _popularity(args)
    elif args.run and not args.popularity:
        from distrag.training.evaluate_run import evaluate_run

        metrics, rank = evaluate_run(args.run, args.part, args.data)
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
    from distrag.data.store import open_store
    from distrag.evaluate import evaluate_popularity
    from distrag.world import end_world, start_world

    world = start_world("cpu")
    try:
        return evaluate_popularity(open_store(args.data), world, args.popularity, args.ks), world.rank
    finally:
        end_world(world)
