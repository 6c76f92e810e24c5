"""Lets one rank die or fail in the middle of a run, and tells how soon all processes are gone and which rank was named.

`python -m tests.training.deaths` prints the table: killed with signal 9 and raising, at forward, backward, all-to-all, evaluation and
saving, on 2 and 3 ranks, under torchrun and as plain processes. The exit code is 1 when anything took 15 seconds or a wrong rank was named.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from distrag import cli
from tests.training.processes import run_processes
from tests.training.runs import config, write_histories

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 15.0
MOMENTS = ("forward", "backward", "all-to-all", "evaluation", "saving")


@dataclass(frozen=True)
class Death:
    """How one rank ends.

    Attributes:
        moment: one of `MOMENTS`, or `loading`, or `start`.
        how: `kill` (with signal 9), `term` or `int` (asked to stop by such a signal), `raise`, `hang`, or `full`: from then on its disk is.
        victim: the rank; -1 for all.
        at: file that holds the time of it afterwards.
        turn: when it comes to the moment for so many times.
    """

    moment: str
    how: str
    victim: int
    at: Path
    turn: int = 3


_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


def arrange(death: Death) -> None:
    """Makes this process end at its turn, if it is the victim."""
    if not death.moment or death.victim not in (-1, int(os.environ["RANK"])):
        return
    times = itertools.count(1)

    def act(*_: Any) -> None:
        if next(times) == death.turn and not death.at.exists():  # once, however often torchrun starts it
            death.at.write_text(str(time.time()))
            if death.how in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[death.how])
                return
            while death.how == "hang":
                time.sleep(1)
            if death.how == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # every file is full from here on
                return
            raise ValueError("bad row 17")

    owner, name = _place(death.moment)
    whole = getattr(owner, name)

    def before(*given: Any, **named: Any) -> Any:
        if death.moment != "backward":
            act()
            return whole(*given, **named)
        loss, count = whole(*given, **named)
        if loss.requires_grad:
            loss.register_hook(act)
        return loss, count

    setattr(owner, name, before)


def _place(moment: str) -> tuple[Any, str]:
    import torch.distributed
    from torch.distributed.checkpoint import FileSystemWriter

    import distrag.training.loop
    from distrag.batching.collate import Collate
    from distrag.evaluate import RankingEvaluator
    from distrag.model import SequenceModel

    return {
        "start": (distrag.training.loop, "build_job"),
        "loading": (Collate, "__call__"),
        "forward": (SequenceModel, "forward"),
        "backward": (SequenceModel, "forward"),
        "all-to-all": (torch.distributed, "all_to_all_single"),
        "evaluation": (RankingEvaluator, "add"),
        "saving": (FileSystemWriter, "write_data"),
    }[moment]


@dataclass(frozen=True)
class Outcome:
    """What was seen of a death.

    Attributes:
        seconds: from it to the end of the last process.
        codes: exit code of every rank, or of the torchrun agent.
        named: rank that each survivor named.
        said: what each process printed.
    """

    seconds: float
    codes: list[int]
    named: list[int]
    said: list[str]


def die_under_torchrun(folder: Path, death: Death, world_size: int, max_restarts: int = 0) -> Outcome:
    """Runs the death under a real torchrun, which starts the ranks anew so many times."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", f"--max-restarts={max_restarts}"]
    words += ["-m", "tests.training.deaths", "--rank"]
    words += [death.moment, death.how, str(death.victim), str(death.at), str(death.turn), "train", "--config", str(folder / "config.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    root = re.findall(r"Root Cause.*?rank\s*:\s*(\d+)", done.stdout, re.S)
    named = [int(rank) for rank in (*re.findall(_NAMES, done.stdout), *root)]
    return Outcome(time.time() - _time_of(death), [done.returncode], named, [done.stdout])


def die_as_processes(folder: Path, death: Death, world_size: int) -> Outcome:
    """Runs the death as plain processes."""

    def act() -> None:
        arrange(death)
        cli.main(["train", "--config", str(folder / "config.yaml")])

    ended = run_processes(act, world_size)
    named = [int(rank) for text in ended.said for rank in re.findall(_NAMES, text)]
    return Outcome(ended.at - _time_of(death), ended.codes, named, ended.said)


_NAMES = r"(?:distrag train: |got:    )rank (\d+)(?: of|: bad)"


def _time_of(death: Death) -> float:
    return float(death.at.read_text()) if death.at.exists() else float("nan")


LAUNCHERS: dict[str, Callable[[Path, Death, int], Outcome]] = {"torchrun": die_under_torchrun, "processes": die_as_processes}
LAUNCHERS["restarts"] = partial(die_under_torchrun, max_restarts=3)


def die(folder: Path, moment: str, how: str, *, launcher: str, world_size: int, victim: int, turn: int = 3, **keys: Any) -> Outcome:
    """Trains in `folder` until a rank dies.

    Args:
        folder: where store and run are written.
        moment: when, as in `Death`; '' for never.
        how: as in `Death`.
        launcher: a key of `LAUNCHERS`.
        world_size: number of ranks.
        victim: the rank that dies; -1 for all.
        turn: as in `Death`.
        **keys: changes of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder.parent / "store"
    if not store.exists():
        write_histories(store, 400)
    # What is written beside the steps is met at any of them; in their way it has a place that can be told in advance.
    keys = {"train__save_every": 2, "train__eval_every": 3, "train__async_save": False, **keys}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(store, folder / "run", **keys)))
    return LAUNCHERS[launcher](folder, Death(moment, how, victim, folder / "died", turn), world_size)


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--rank"]:
        moment, how, victim, at, turn, *words = sys.argv[2:]
        arrange(Death(moment, how, int(victim), Path(at), int(turn)))
        sys.argv[1:] = words
        cli.run()
        return
    parser = argparse.ArgumentParser(prog="python -m tests.training.deaths", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moments", nargs="+", choices=(*MOMENTS, "loading"), default=list(MOMENTS))
    parser.add_argument("--launchers", nargs="+", choices=("torchrun", "processes"), default=["torchrun", "processes"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--victim", type=int, default=1)
    args = parser.parse_args()
    print("| moment | ranks | started by | " + " | ".join(f"{how}: seconds, exit codes, named" for how in ("kill -9", "ValueError")) + " |")
    print("|---|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as top:
        for number, (moment, launcher, world_size) in enumerate(itertools.product(args.moments, args.launchers, args.worlds)):
            cells = []
            for how in ("kill", "raise"):
                folder = Path(top) / f"{number}-{how}"
                seen = die(folder, moment, how, launcher=launcher, world_size=world_size, victim=args.victim)
                cells.append(f"{seen.seconds:.1f} s, {'/'.join(map(str, seen.codes))}, rank {','.join(map(str, sorted(set(seen.named))))}")
                if not seen.seconds < LIMIT_S or set(seen.named) != {args.victim} or 0 in seen.codes:
                    bad += 1
                    print(*seen.said, sep="\n---\n", file=sys.stderr)
            print(f"| {moment} | {world_size} | {launcher} | {' | '.join(cells)} |", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
