"""`distrag submit | jobs`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from distrag.cli.words import command_parser, full_words


def run_submit(words: list[str]) -> None:
    """Runs `distrag submit`; the exit code is 1 where a job was followed and did not succeed."""
    args, overrides = _submit_parser().parse_known_args(words)
    from distrag.cluster.app import build_ranks, read_spec
    from distrag.cluster.environment import parse_pairs
    from distrag.cluster.jobs import open_runner
    from distrag.cluster.submit import check, check_scheduler, describe_ask, dry_run, read_options, schedule
    from distrag.training.plan_text import describe_plan

    check_scheduler(args.scheduler)
    named = ("resource", "cpu", "gpu", "memory", "name", "image", "max_restarts", "max_retries", "log_dir")
    given = {name: getattr(args, name) for name in named}
    spec = read_spec(args.size, env=parse_pairs(args.env), mounts=args.mount, **given)
    train = ["--config", args.config, *full_words(overrides)]
    app = build_ranks("train", train, spec)
    with open_runner() as runner:
        options = read_options(runner, args.scheduler, args.cfg)
        if not args.unchecked:
            print(describe_plan(check(train, spec)[1]))
        info = dry_run(runner, app, args.scheduler, options)
        print(describe_ask(spec, args.scheduler), flush=True)
        if args.dryrun:
            print(info)
            return
        handle = schedule(runner, info)
        _follow(runner, handle, watches=args.watch)


def _submit_parser() -> argparse.ArgumentParser:
    parser = command_parser("submit")
    parser.epilog = "Every other word, such as --optim.lr 0.003, is a key of the config, as for `distrag train`."
    parser.add_argument("--config", required=True, help="YAML of a run, the same as for `distrag train`")
    parser.add_argument("-j", "--size", default="1x1", help="job size: RANKS, MACHINESxRANKS or LEAST:MOSTxRANKS (elastic); default 1x1")
    parser.add_argument("-s", "--scheduler", default="slurm", help="slurm (default), kubernetes or local_cwd, which is this machine")
    parser.add_argument("--cfg", action="append", default=[], metavar="KEY=VALUE", help="option of the scheduler, such as partition=low")
    parser.add_argument("--resource", default="", help="what a machine has, by name: cpu_small, cpu_large, gpu_a100_8, gpu_h100_8, ...")
    parser.add_argument("--cpu", type=int, default=0, help="cores of a machine; otherwise the resource's, or one a rank")
    parser.add_argument("--gpu", type=int, default=0, help="GPUs of a machine; otherwise the resource's, or none")
    parser.add_argument(
        "--memory", default="", help="memory of a machine, such as 64GiB; otherwise the resource's, or what the scheduler gives"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the job; any value")
    parser.add_argument("--name", default="", help="of the job")
    parser.add_argument("--image", default="", help="Kubernetes: container image with distrag in it")
    parser.add_argument("--mount", action="append", default=[], metavar="type=volume,src=CLAIM,dst=/data", help="Kubernetes: a volume")
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts of the ranks by torchrun; default 3")
    parser.add_argument("--max-retries", type=int, default=0, help="new starts of the whole job after a failure; default 0")
    parser.add_argument("--log-dir", default="", help="folder in which torchrun keeps what each rank prints")
    parser.add_argument("--dryrun", action="store_true", help="print what the scheduler would be given, and submit nothing")
    parser.add_argument(
        "--watch", action="store_true", help="print what all machines print until the job has ended; Ctrl-C leaves it running"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not check config, store and plan, where the store cannot be read from here"
    )
    return parser


def _follow(runner: Any, handle: str, *, watches: bool) -> None:
    """Prints the handle, and all that the job prints where it is watched; a job of this machine always is, and ends with this process."""
    from torchx.schedulers.local_scheduler import SignalException

    from distrag.cluster.jobs import describe, print_logs

    local = handle.startswith("local_cwd:")
    print(handle, flush=True)
    if not (watches or local):
        print(
            f"`distrag jobs logs {handle} --follow` shows what it prints, `distrag jobs cancel {handle}` ends it after a save",
            file=sys.stderr,
        )
        return
    try:
        told = print_logs(runner, handle, follows=True)
    except KeyboardInterrupt:
        print(f"\n{handle} goes on; `distrag jobs logs {handle} --follow` shows it again")
        raise
    except SignalException as stopped:  # TorchX's own, where the job is of this machine; it ends with this process, after a save
        raise SystemExit(128 + stopped.sigval) from None
    print(describe(told))
    if told.state.name != "SUCCEEDED":
        raise SystemExit(1)


def run_jobs(words: list[str]) -> None:
    """Runs `distrag jobs`."""
    parser = command_parser("jobs")
    parts = parser.add_subparsers(dest="what", required=True, metavar="status | logs | cancel | list")
    for what, told in (
        ("status", "states of a job and its machines"),
        ("logs", "what a job printed"),
        ("cancel", "end a job, after a save"),
    ):
        part = parts.add_parser(what, help=told, allow_abbrev=False)
        part.add_argument("handle", help="what `distrag submit` printed, or the number of a Slurm job")
        if what == "logs":
            part.add_argument("--follow", action="store_true", help="go on until the job has ended; the exit code is 1 where it failed")
        if what == "status":
            part.add_argument("--json", action="store_true")
    listing = parts.add_parser("list", help="jobs of the last seven days", allow_abbrev=False)
    listing.add_argument("-s", "--scheduler", default="slurm", help="slurm (default) or kubernetes")
    args = parser.parse_args(words)
    _jobs(args)


def _jobs(args: argparse.Namespace) -> None:
    from distrag.cluster.jobs import as_json, ask, cancel, describe, list_jobs, open_runner, parse_handle, print_logs
    from distrag.cluster.submit import check_scheduler

    with open_runner() as runner:
        if args.what == "list":
            check_scheduler(args.scheduler)
            for handle, state in list_jobs(runner, args.scheduler):
                print(f"{handle:32} {state}")
            return
        handle = parse_handle(args.handle)
        if args.what == "status":
            told = ask(runner, handle)
            print(json.dumps(as_json(told)) if args.json else describe(told))
        elif args.what == "cancel":
            told = cancel(runner, handle)
            print(f"{handle}: {'had ended before: ' + told.state.name.lower() if told.has_ended else 'asked to end; it saves first'}")
        else:
            told = print_logs(runner, handle, follows=args.follow)
            if args.follow:
                print(describe(told))
                if told.state.name != "SUCCEEDED":
                    raise SystemExit(1)
