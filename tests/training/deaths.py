"""Lets one rank die or fail in the middle of a run, and tells how soon all processes are gone and which rank was named.

`python -m tests.training.deaths` prints the table: killed with signal 9 and raising, at forward, backward, all-to-all, evaluation and
saving, on 2 and 3 ranks, under torchrun and as plain processes. The exit code is 1 when anything took 15 seconds or a wrong rank was named.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distrag.cli import main as distrag
from distrag.cli import run
from tests.training.runs import config, write_histories

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 15.0
MOMENTS = ("forward", "backward", "all-to-all", "evaluation", "saving")


@dataclass(frozen=True)
class Death:
    """How one rank ends.

    Attributes:
        moment: one of `MOMENTS`, or `loading`.
        how: `kill` or `raise`.
        victim: the rank.
        at: file that holds the time of it afterwards.
    """

    moment: str
    how: str
    victim: int
    at: Path


def arrange(death: Death) -> None:
    """Makes this process end at the third time that it comes to the moment, if it is the victim."""
    if int(os.environ["RANK"]) != death.victim:
        return
    times = itertools.count(1)

    def act(*_: Any) -> None:
        if next(times) == 3:
            death.at.write_text(str(time.time()))
            if death.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
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

    from distrag.batching.collate import Collate
    from distrag.evaluate import RankingEvaluator
    from distrag.model import SequenceModel

    return {
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


def die_under_torchrun(folder: Path, death: Death, world_size: int) -> Outcome:
    """Runs the death under a real torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", "-m", "tests.training.deaths", "--rank"]
    words += [death.moment, death.how, str(death.victim), str(death.at), "train", "--config", str(folder / "config.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    root = re.findall(r"Root Cause.*?rank\s*:\s*(\d+)", done.stdout, re.S)
    named = [int(rank) for rank in (*re.findall(_NAMES, done.stdout), *root)]
    return Outcome(time.time() - _time_of(death), [done.returncode], named, [done.stdout])


def die_as_processes(folder: Path, death: Death, world_size: int) -> Outcome:
    """Runs the death as plain processes with a rendezvous of their own, as Slurm's srun would start them."""
    import torchrec.distributed.model_parallel  # noqa: F401 - once here instead of seconds in every fork

    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [
        multiprocessing.get_context("fork").Process(target=_rank, args=(rank, world_size, port, folder, death))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ended = time.time()
    said = [(folder / f"said-{rank}").read_text() for rank in range(world_size)]
    named = [int(rank) for text in said for rank in re.findall(_NAMES, text)]
    return Outcome(ended - _time_of(death), [process.exitcode or 0 for process in processes], named, said)


_NAMES = r"distrag train: rank (\d+) of"


def _time_of(death: Death) -> float:
    return float(death.at.read_text()) if death.at.exists() else float("nan")


def _rank(rank: int, world_size: int, port: int, folder: Path, death: Death) -> None:
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "localhost", **{name: str(value) for name, value in sizes.items()}})
    arrange(death)
    distrag(["train", "--config", str(folder / "config.yaml")])


LAUNCHERS: dict[str, Callable[[Path, Death, int], Outcome]] = {"torchrun": die_under_torchrun, "processes": die_as_processes}


def die(folder: Path, moment: str, how: str, *, launcher: str, world_size: int, victim: int, **keys: Any) -> Outcome:
    """Trains in `folder` until a rank dies.

    Args:
        folder: where store and run are written.
        moment: when, one of `MOMENTS` or `loading`.
        how: `kill` or `raise`.
        launcher: a key of `LAUNCHERS`.
        world_size: number of ranks.
        victim: the rank that dies.
        **keys: changes of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder.parent / "store"
    if not store.exists():
        write_histories(store, 400)
    keys = {"train__save_every": 2, "train__eval_every": 3, **keys}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(store, folder / "run", **keys)))
    return LAUNCHERS[launcher](folder, Death(moment, how, victim, folder / "died"), world_size)


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--rank"]:
        moment, how, victim, at, *words = sys.argv[2:]
        arrange(Death(moment, how, int(victim), Path(at)))
        sys.argv[1:] = words
        run()
        return
    parser = argparse.ArgumentParser(prog="python -m tests.training.deaths", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moments", nargs="+", choices=(*MOMENTS, "loading"), default=list(MOMENTS))
    parser.add_argument("--launchers", nargs="+", choices=tuple(LAUNCHERS), default=list(LAUNCHERS))
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
