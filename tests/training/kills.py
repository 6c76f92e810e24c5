"""Kills a training run with signal 9 at random moments, resumes it each time, on changing numbers of ranks, and counts its samples.

`python -m tests.training.kills --kills 20` runs two epochs under torchrun, as a user does; `--launcher forks` starts ranks in a tenth of
the time. The exit code is 1 when any sample of an epoch was lost or repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distrag.checkpoint import newest_checkpoint, read_extra
from tests.training.runs import Reaches, config, cut, faults_of, losses_of, write_histories

ROOT = Path(__file__).resolve().parents[2]
PER_RANK = {"batching__global_tokens": None, "batching__max_tokens": 40}
"""With a budget a rank, other ranks make other steps: the rest of an epoch is planned anew."""
Launch = Callable[[dict[str, Any], int, Callable[[], bool], int], bool]


def launch_torchrun(sections: dict[str, Any], world_size: int, is_time: Callable[[], bool], victim: int, *options: str) -> bool:
    """Trains under torchrun until `is_time()`, then kills the agent and every rank, `victim` first; returns whether it was killed."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(sections, file)
        file.flush()
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
            *options,
            "-m",
            "distrag",
            "train",
            "--config",
            file.name,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agent = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while agent.poll() is None and not is_time():
            time.sleep(0.005)
        if agent.poll() is None:
            ranks = children_of(agent.pid)
            for pid in [*ranks[victim:], *ranks[:victim], agent.pid]:
                os.kill(pid, signal.SIGKILL)
            agent.communicate()
            return True
        told = agent.communicate()[1]
        if agent.returncode:
            raise RuntimeError(f"torchrun ended with {agent.returncode}:\n{told.decode()[-4000:]}")
        return False


def children_of(pid: int) -> list[int]:
    """Returns the processes that `pid` started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for path in tasks for child in path.read_text().split())


def kill_and_resume(
    folder: Path,
    *,
    kills: int,
    worlds: Sequence[int],
    launch: Launch = cut,
    num_samples: int = 400,
    seed: int = 0,
    start_s: float = 1.0,
    delay_s: float = 0.1,
    **keys: Any,
) -> dict[str, Any]:
    """Trains two epochs through `kills` random kills; returns what was counted.

    Most moments are a random time after a random share of the two epochs, and fall anywhere in a step, a save or an evaluation; some fall
    in the start of a run.

    Args:
        folder: where store and run are written.
        kills: how many.
        worlds: numbers of ranks, one after the other, each for its share of the kills.
        launch: starts the ranks.
        num_samples: samples of an epoch.
        seed: of the moments.
        start_s: about how long a run takes to start.
        delay_s: longest time after a step.
        **keys: changes of the config.
    """
    random, run = np.random.default_rng(seed), folder / "run"
    store = write_histories(folder / "store", num_samples)
    sections = config(store, run, train__save_every=3, train__resume=True, **keys)
    # What is trained grows over the resumes, so each later moment lies behind the one before; the last ones leave time to be killed in.
    amounts = np.sort(random.uniform(0.02, 0.9, kills)) * 2 * num_samples
    moments = []
    for number, amount in enumerate(amounts):
        world_size = worlds[number * len(worlds) // kills]
        is_time = after(random.uniform(0, delay_s), Reaches(run, amount, unit="samples"))
        if random.random() < 0.15:
            is_time = either(is_time, after(random.uniform(0, start_s), lambda: True))
        if not launch(sections, world_size, is_time, int(random.integers(world_size))):
            raise RuntimeError(f"the run ended before kill {number + 1} of {kills}, which waited for {amount:.0f} samples")
        last = newest_checkpoint(run / "checkpoints")
        saved = read_extra(last) if last else {"step": 0, "epochs_done": 0.0}
        logged = max((step for step, _ in losses_of(run)), default=0)
        moments.append({"ranks": world_size, "logged": logged, "saved": saved["step"], "epochs": round(saved["epochs_done"], 2)})
        print(f"kill {number + 1}: {moments[-1]}", file=sys.stderr, flush=True)
    assert not launch(sections, worlds[-1], lambda: False, 0)
    logged = [step for step, _ in losses_of(run)]
    return {
        "kills": len(moments),
        "changes_of_ranks": sum(a["ranks"] != b["ranks"] for a, b in itertools.pairwise(moments)),
        "samples_an_epoch": num_samples,
        "steps": len(logged),
        "steps_trained_twice": sum(moment["logged"] - moment["saved"] for moment in moments),
        "steps_logged_once_each": logged == list(range(1, len(logged) + 1)),
        "finished": (run / "result.json").exists(),
        "faults": faults_of(run, num_samples, 2),
        "moments": moments,
    }


def after(seconds: float, is_time: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a test whether `is_time` came true at least so long ago."""
    since: list[float] = []

    def has() -> bool:
        if not since and is_time():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return has


def either(first: Callable[[], bool], second: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a test whether one of two came true."""
    return lambda: first() or second()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 1])
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", choices=("global_tokens", "max_tokens"), default="max_tokens", help="of all ranks, or of each")
    parser.add_argument("--launcher", choices=("torchrun", "forks"), default="torchrun")
    args = parser.parse_args()
    launch: Launch = launch_torchrun if args.launcher == "torchrun" else cut
    times = {"start_s": 12.0, "delay_s": 0.3} if args.launcher == "torchrun" else {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {"kills": args.kills, "worlds": args.worlds, "num_samples": args.samples, "seed": args.seed, **times}
        run |= {} if args.budget == "global_tokens" else PER_RANK
        found = kill_and_resume(Path(folder), launch=launch, **run)
    print(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}))
    sys.exit(bool(found["faults"]) or not found["finished"] or not found["steps_logged_once_each"])


if __name__ == "__main__":
    main()
