"""`distrag train | evaluate | export | report | verify`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from distrag.cli.words import command_parser, full_words


def run_train(words: list[str]) -> None:
    """Runs `distrag train`."""
    from distrag.config import build_parser, read_config

    if "-h" in words or "--help" in words:
        build_parser().print_help()
        return
    config = read_config(full_words(words))
    from distrag.training.loop import train

    train(config)


def run_evaluate(words: list[str]) -> None:
    """Runs `distrag evaluate`."""
    parser = command_parser("evaluate")
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


def run_export(words: list[str]) -> None:
    """Runs `distrag export`."""
    parser = command_parser("export")
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


def run_report(words: list[str]) -> None:
    """Runs `distrag report`."""
    parser = command_parser("report")
    parser.add_argument("run", help="a run directory")
    args = parser.parse_args(words)
    from distrag.report.page import write_report

    print(write_report(args.run))


def run_verify(words: list[str]) -> None:
    """Runs `distrag verify`."""
    parser = command_parser("verify")
    parser.add_argument("config", help="YAML of a run")
    parser.add_argument("--world-sizes", default="1,2", metavar="1,2,...", help="numbers of ranks, started here; 1 is always among them")
    parser.add_argument("--steps", type=int, default=20, help="global steps to train")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference that is still equal")
    parser.add_argument("--json", action="store_true")
    args, overrides = parser.parse_known_args(words)
    from distrag.config import read_config
    from distrag.training.verify import verify
    from distrag.training.verify_text import describe_verify, verify_json

    config = read_config(["--config", args.config, *full_words(overrides)])
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
