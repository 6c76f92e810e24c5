"""A real Slurm on this machine, and what is submitted to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.training.runs import config, losses_of, write_histories

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "slurm.sh"
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Site:
    """A folder with a config, from which jobs are submitted.

    Attributes:
        folder: the folder.
        config: the config's file.
    """

    folder: Path
    config: Path

    def losses(self, run: str) -> list[tuple[int, float]]:
        """Returns step and loss of every trained step of a run."""
        return losses_of(self.folder / run)


def write_site(folder: Path) -> Site:
    """Returns a folder with a store of uneven histories and a config of 30 steps."""
    store = write_histories(folder / "store")
    sections = config(store, folder / "run", train__num_epochs=0, train__max_steps=30, train__save_every=5, train__eval_every=15)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    return Site(folder, folder / "config.yaml")


def run_distrag(*words: str, cwd: Path, limit_s: float = 120, **environment: str) -> Done:
    """Returns how `distrag` ended with these words, and what it printed."""
    command = [sys.executable, "-m", "distrag", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)


def wait_until(what: Callable[[], object], limit_s: float = 60) -> None:
    """Returns once `what` holds.

    Raises:
        TimeoutError: it does not, in time.
    """
    end = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > end:
            raise TimeoutError("it did not come to that")
        time.sleep(0.1)


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs.

    Attributes:
        environ: of whoever talks to it.
    """

    environ: dict[str, str] = field(default_factory=dict)

    def ask(self, *words: str) -> str:
        """Returns what one of Slurm's commands prints."""
        return subprocess.run(
            words, env={**os.environ, **self.environ}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def distrag(self, *words: str, cwd: Path, limit_s: float = 120) -> Done:
        """Returns how `distrag` ended on a machine of this cluster."""
        return run_distrag(*words, cwd=cwd, limit_s=limit_s, **self.environ)

    def submit(self, site: Site, size: str, *words: str) -> str:
        """Returns the handle of a job that trains the site's config, unchecked since that is quicker."""
        done = self.distrag("submit", "--config", str(site.config), "-j", size, "--unchecked", *words, cwd=site.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def state(self, handle: str) -> str:
        """Returns the job's state in Slurm's words, those of all its parts."""
        number = handle.rpartition("/")[2]
        return self.ask("squeue", "-h", "-t", "all", "-o", "%T", "-j", number).replace("\n", " ")

    def start_now(self, handle: str) -> None:
        """Starts a job that was queued again, which Slurm would do in two minutes."""
        wait_until(lambda: set(self.state(handle).split()) == {"PENDING"})
        self.ask("scontrol", "update", f"JobId={handle.rpartition('/')[2]}", "StartTime=now")

    def pre_empt(self, seconds: int = 3) -> None:
        """Takes both nodes for a job of the partition that goes first, and returns once that has ended."""
        self.ask("sbatch", "--wait", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", f"sleep {seconds}")


@contextmanager
def start_slurm(folder: Path) -> Iterator[Slurm]:
    """Gives a Slurm for as long as the block runs; skips where this machine cannot have one."""
    installed = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    if installed.returncode:
        pytest.skip(f"no Slurm can be had on this machine: {installed.stderr.strip().splitlines()[-1]}")
    started = subprocess.run([SCRIPT, "up", str(folder)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert started.returncode == 0, started.stderr
    try:
        yield Slurm({"SLURM_CONF": str(folder / "slurm.conf")})
    finally:
        subprocess.run([SCRIPT, "down", str(folder)], check=True, capture_output=True, timeout=120)
