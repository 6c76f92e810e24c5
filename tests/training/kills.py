"""Kills a training run with signal 9 and stops it with SIGTERM at random moments, resumes it each time, and counts its samples.

`python -m tests.training.kills --kills 50 --terms 20` runs two epochs under torchrun, as a user does; `--launcher forks` starts ranks in a
tenth of the time. On one number of ranks (`--worlds 2`) losses, parameters and optimizer state must be those of a run that was not
interrupted, bit for bit; on several, one after the other, every sample of an epoch must be trained once. The exit code is 1 otherwise.
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
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distrag import cli
from distrag.checkpoint import load_checkpoint, newest_checkpoint, read_extra
from distrag.config import read_config
from distrag.leaving import PREEMPTED
from distrag.training.build import build_job
from distrag.training.optim import build_optimizer
from distrag.world import open_world
from tests.embedding.test_tables import full_tables
from tests.ranks import run_ranks
from tests.training.processes import children_of, run_processes
from tests.training.runs import Reaches, config, cut, faults_of, losses_of, write_histories

ROOT = Path(__file__).resolve().parents[2]
PER_RANK = {"batching__global_tokens": None, "batching__max_tokens": 40}
"""With a budget a rank, other ranks make other steps: the rest of an epoch is planned anew."""
Moment = Callable[[], bool]
Launch = Callable[[dict[str, Any], int, Moment, int, str], bool]


def launch_torchrun(sections: dict[str, Any], world_size: int, is_time: Moment, victim: int, how: str, *options: str) -> bool:
    """Trains under torchrun until `is_time()`; returns whether the run was ended then.

    Args:
        sections: the config.
        world_size: number of ranks.
        is_time: whether to end it.
        victim: the rank that is killed first.
        how: `kill` kills every rank and the agent with signal 9, `term` sends the agent a SIGTERM, as a scheduler does.
        *options: of torchrun.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(sections, file)
        file.flush()
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", *options, "-m", "distrag"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agent = subprocess.Popen(
            [sys.executable, *words, "train", "--config", file.name],
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        while agent.poll() is None and not is_time():
            time.sleep(0.005)
        ended = agent.poll() is None
        if ended and how == "kill":
            ranks = children_of(agent.pid)
            for pid in [*ranks[victim:], *ranks[:victim], agent.pid]:
                os.kill(pid, signal.SIGKILL)
        elif ended:
            agent.terminate()
        said = agent.communicate()[1].decode()
        wanted = {(False, "kill"): 0, (False, "term"): 0, (True, "kill"): -signal.SIGKILL, (True, "term"): 1}[ended, how]
        if agent.returncode != wanted or (how == "term" and "SIGKILL" in said):
            raise RuntimeError(f"torchrun ended with {agent.returncode}, not {wanted}:\n{said[-4000:]}")
        return ended


def launch_forks(sections: dict[str, Any], world_size: int, is_time: Moment, victim: int, how: str) -> bool:
    """Trains on forks until `is_time()`; as `launch_torchrun`, but SIGTERM goes to every rank."""
    if how == "kill":
        return cut(sections, world_size, is_time, victim)
    ended = run_processes(lambda: _train_until_asked(sections, is_time), world_size)
    codes = set(ended.codes)
    if not (codes == {0} or codes <= {PREEMPTED, -signal.SIGTERM}):  # the latter while the ranks still look for each other
        raise RuntimeError("\n".join([f"the ranks ended with {ended.codes}", *ended.said]))
    return codes != {0}


def _train_until_asked(sections: dict[str, Any], is_time: Moment) -> None:
    def watch() -> None:
        while not is_time():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(sections, file)
        file.flush()
        cli.main(["train", "--config", file.name])
    os._exit(0)  # a signal of the same moment finds a run that has ended


def kill_and_resume(
    folder: Path,
    *,
    kills: int,
    worlds: Sequence[int],
    terms: int = 0,
    launch: Launch = launch_forks,
    num_samples: int = 400,
    seed: int = 0,
    start_s: float = 1.0,
    delay_s: float = 0.1,
    **keys: Any,
) -> dict[str, Any]:
    """Trains two epochs through `kills` random kills and `terms` SIGTERMs; returns what was counted.

    Most moments are a random time after a random share of the two epochs, and fall anywhere in a step, a save or an evaluation; a third
    lies in a save, or right after it, and some in the start of a run.

    Args:
        folder: where store and run are written.
        kills: how many SIGKILLs.
        worlds: numbers of ranks, one after the other, each for its share of the interruptions.
        terms: how many SIGTERMs.
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
    amounts = np.sort(random.uniform(0.02, 0.9, kills + terms)) * 2 * num_samples
    hows, moments = random.permutation(["kill"] * kills + ["term"] * terms), []
    for number, (amount, how) in enumerate(zip(amounts, hows.tolist(), strict=True)):
        world_size = worlds[number * len(worlds) // len(amounts)]
        is_time: Moment = Reaches(run, amount, unit="samples")
        kind = random.choice(["any", "saving", "start"], p=[0.55, 0.3, 0.15])
        if kind == "saving":
            is_time = after(random.uniform(0, 0.03), Changes(run / "checkpoints", is_time))
        else:
            is_time = after(random.uniform(0, delay_s), is_time)
            if kind == "start":
                is_time = either(is_time, after(random.uniform(0, start_s), lambda: True))
        if not launch(sections, world_size, is_time, int(random.integers(world_size)), how):
            raise RuntimeError(f"the run ended before interruption {number + 1} of {len(amounts)}, which waited for {amount:.0f} samples")
        last = newest_checkpoint(run / "checkpoints")
        saved = read_extra(last) if last else {"step": 0, "epochs_done": 0.0}
        logged = max((step for step, _ in losses_of(run)), default=0)
        # A SIGTERM that came before the run had begun leaves what the one before had left.
        kept = saved["step"] == logged or (bool(moments) and [moments[-1][key] for key in ("logged", "saved")] == [logged, saved["step"]])
        moment = {"how": how, "at": str(kind), "ranks": world_size, "logged": logged, "saved": saved["step"], "kept": kept}
        moments.append({**moment, "epochs": round(saved["epochs_done"], 2)})
        print(f"interruption {number + 1}: {moments[-1]}", file=sys.stderr, flush=True)
    assert not launch(sections, worlds[-1], lambda: False, 0, "kill")
    logged = [step for step, _ in losses_of(run)]
    found = {
        "kills": kills,
        "terms": terms,
        "terms_that_saved_their_last_step": sum(moment["kept"] for moment in moments if moment["how"] == "term"),
        "changes_of_ranks": sum(a["ranks"] != b["ranks"] for a, b in itertools.pairwise(moments)),
        "samples_an_epoch": num_samples,
        "steps": len(logged),
        "steps_trained_twice": sum(moment["logged"] - moment["saved"] for moment in moments),
        "steps_logged_once_each": logged == list(range(1, len(logged) + 1)),
        "finished": (run / "result.json").exists(),
        "faults": faults_of(run, num_samples, 2),
    }
    if len(set(worlds)) == 1:
        whole = {**sections, "train": {**sections["train"], "run_dir": str(folder / "whole"), "resume": False}}
        assert not launch(whole, worlds[0], lambda: False, 0, "kill")
        found["differences"] = differences(sections, whole)
    return {**found, "moments": moments}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns what two runs of the same config differ in, bit for bit: losses, and parameters and optimizer state of their checkpoints."""
    runs = [Path(sections["train"]["run_dir"]) for sections in (one, other)]
    differ = [] if losses_of(runs[0]) == losses_of(runs[1]) else ["losses"]
    for name in ("newest", "best"):
        folders = [run / "checkpoints" for run in runs]
        paths = [newest_checkpoint(folder) if name == "newest" else folder / name for folder in folders]
        states = [run_ranks(_full_state, 1, sections, path)[0] for sections, path in zip((one, other), paths, strict=True)]
        keys = states[0].keys() | states[1].keys()
        same = [key for key in keys if all(key in state for state in states) and np.array_equal(states[0][key], states[1][key])]
        differ += [f"{name}: {key}" for key in sorted(keys - set(same))]
        assert len(same) > 5, "there is something to compare"
    return differ


def _full_state(sections: dict[str, Any], path: Path) -> dict[str, Any]:
    with open_world("cpu") as world:
        job = build_job(read_config(sections), world)
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        load_checkpoint(path, job.parallel, optimizer, world)
        states = optimizer.state_dict()["state"].items()
        numbers = {f"{name} {key}": value for name, state in states for key, value in state.items()}
        return {**full_tables(job.parallel.model), **{key: _plain(value) for key, value in numbers.items()}}


def _plain(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        return np.concatenate([shard.tensor.numpy() for shard in value.local_shards()])
    return np.asarray(value)


class Changes:
    """A test whether files came or went in a folder since another test came true: a save has begun, or is through.

    Args:
        folder: the folder, which need not be there.
        since: the other test.
    """

    def __init__(self, folder: Path, since: Moment) -> None:
        self.folder, self.since = folder, since
        self.before: list[tuple[str, int]] | None = None

    def __call__(self) -> bool:
        """Looks."""
        if self.before is None and not self.since():
            return False
        try:
            now = sorted((path.name, path.stat().st_mtime_ns) for path in self.folder.iterdir())
        except OSError:  # what was listed has gone, or nothing was saved yet
            return self.before is not None and self.folder.exists()
        self.before, before = now if self.before is None else self.before, self.before
        return before is not None and before != now


def after(seconds: float, is_time: Moment) -> Moment:
    """Returns a test whether `is_time` came true at least so long ago."""
    since: list[float] = []

    def has() -> bool:
        if not since and is_time():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return has


def either(first: Moment, second: Moment) -> Moment:
    """Returns a test whether one of two came true."""
    return lambda: first() or second()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--terms", type=int, default=0)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 1])
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", choices=("global_tokens", "max_tokens"), default="max_tokens", help="of all ranks, or of each")
    parser.add_argument("--launcher", choices=("torchrun", "forks"), default="torchrun")
    args = parser.parse_args()
    launch: Launch = launch_torchrun if args.launcher == "torchrun" else launch_forks
    times = {"start_s": 12.0, "delay_s": 0.3} if args.launcher == "torchrun" else {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {"kills": args.kills, "terms": args.terms, "worlds": args.worlds, "num_samples": args.samples}
        run |= {"seed": args.seed, **times, **({} if args.budget == "global_tokens" else PER_RANK)}
        found = kill_and_resume(Path(folder), launch=launch, **run)
    print(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}))
    bad = found["faults"] or found.get("differences") or not found["finished"] or not found["steps_logged_once_each"]
    sys.exit(bool(bad) or found["terms_that_saved_their_last_step"] < args.terms)


if __name__ == "__main__":
    main()
