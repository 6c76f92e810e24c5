"""Whether the schedulers that have their tools on this machine answer."""

from __future__ import annotations

import shutil
import subprocess

from distrag.doctor.line import Line

_LIMIT_S = 15


def check_schedulers() -> list[Line]:
    """Returns a line for Slurm and one for Kubernetes; having neither is no fault, and training here needs none."""
    return [_slurm(), _kubernetes()]


def _slurm() -> Line:
    if not shutil.which("sinfo"):
        return Line("Slurm", "ok", "not on this machine")
    code, out = _run(["sinfo", "--noheader", "--format=%P %D %t"])
    if code and "configuration source" in out:  # its programs lie here, and no slurm.conf
        return Line("Slurm", "ok", "its programs, and no cluster that they know; SLURM_CONF names one")
    if code:
        return Line("Slurm", "problem", f"sinfo: {out}", "`scontrol ping` shows whether slurmctld runs; ask who runs the cluster")
    states = [line.split()[-1].rstrip("*~#!%$@^-") for line in out.splitlines() if line.split()]
    usable = any(state in ("idle", "mix", "mixed", "alloc", "allocated", "comp", "completing") for state in states)
    told = "; ".join(out.splitlines()) or "no partitions"
    if not usable:
        return Line("Slurm", "warning", told, "no node takes jobs; `sinfo -R` says why")
    code, accounts = _run(["sacct", "--noheader", "--allocations"])
    if code:
        return Line("Slurm", "warning", f"{told}; sacct: {accounts}", "accounting does not answer: states of ended jobs will be missing")
    return Line("Slurm", "ok", told)


def _kubernetes() -> Line:
    if not shutil.which("kubectl"):
        return Line("Kubernetes", "ok", "no kubectl on this machine")
    code, out = _run(["kubectl", "config", "current-context"])
    if code:
        return Line("Kubernetes", "ok", "kubectl knows no cluster")
    context = out
    code, out = _run(["kubectl", "get", "crd", "jobs.batch.volcano.sh", "--request-timeout=10s", "--output=name"])
    if code:
        return Line("Kubernetes", "warning", f"{context}: {out}", "jobs need Volcano in the cluster and the right to see it")
    return Line("Kubernetes", "ok", f"{context}, with Volcano")


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_LIMIT_S} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()
