"""What started the ranks: a torchrun agent, a Slurm job, a job of TorchX, or nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """What started the ranks, so that a second start by the same torchrun or job can be told from another run.

    Attributes:
        names: torchrun agents and jobs of all ranks, to be written down.
        again: those of `names` under which this start is a later one, if they were written down before.
    """

    names: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()


def launch_here(environ: Mapping[str, str]) -> Launch:
    """Returns what started this process: the torchrun agent above it, its Slurm job, its job of TorchX.

    Args:
        environ: the process's environment.
    """
    names, again = set[str](), set[str]()
    if "TORCHELASTIC_RUN_ID" in environ:
        # An agent outlives its workers, and restarts them when one fails or when a node joins; only the first is counted as a restart.
        agent = f"torchrun {environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()} {_start_of(os.getppid())}"
        names, again = {agent}, {agent}
    if job := environ.get("SLURM_JOB_ID"):
        names |= {f"slurm {job}"}
        again |= {f"slurm {job}"} if int(environ.get("SLURM_RESTART_COUNT", "0")) > 0 else set()
    if job := environ.get("TORCHX_JOB_ID"):  # the same for every pod that Kubernetes starts for a job, one after another
        names, again = names | {f"torchx {job}"}, again | {f"torchx {job}"}
    return Launch(frozenset(names), frozenset(again))


def join_launches(launches: list[Launch]) -> Launch:
    """Returns what started any of the ranks."""
    names, again = ([getattr(each, name) for each in launches] for name in ("names", "again"))
    return Launch(frozenset().union(*names), frozenset().union(*again))


def _start_of(pid: int) -> str:
    """Returns when a process began, in ticks since the machine did; '' where the kernel does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
