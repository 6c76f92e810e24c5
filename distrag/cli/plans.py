"""`distrag plan | bench`."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

from distrag.cli.words import command_parser, full_words

BENCHES = {
    "": "whole training steps against the padded way of working",
    "plan-balance": "how even planned steps are over the ranks, beside a random deal and balancing after loading",
    "plan-speed": "seconds and memory of planning an epoch, beside other samplers",
    "safety": "what the checks of a training step cost",
    "saving": "how long a save holds up training, written in its way and beside it",
    "ranks": "under torchrun: the ranks' measured imbalance, by the plan and by a plain DistributedSampler",
}


def run_plan(words: list[str]) -> None:
    """Runs `distrag plan`."""
    parser = command_parser("plan")
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

    config = read_config(["--config", args.config, *full_words(overrides)])
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


def run_bench(words: list[str]) -> None:
    """Runs `distrag bench`."""
    which = words[0] if words and words[0] in BENCHES else ""
    parser = command_parser(f"bench {which}".strip(), BENCHES[which])
    name = {"": "command", "plan-balance": "balance", "plan-speed": "speed"}.get(which, which)
    bench: Callable[[argparse.ArgumentParser, list[str]], object] = importlib.import_module(f"distrag.bench.{name}").bench
    if not which:
        parser.epilog = "Other benches: " + "; ".join(f"`distrag bench {name}`, {what}" for name, what in BENCHES.items() if name) + "."
    bench(parser, words[1:] if which else words)
