"""What the machine gives a process: cores, memory, limits of the kernel."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from distrag.doctor.line import Line

_LEAST_FILES = 1024
_GIB = 2**30


def check_machine() -> list[Line]:
    """Returns cores, memory, shared memory and limits."""
    return [_cores(), _memory(), _shared_memory(), _files(), _locked_memory()]


def _cores() -> Line:
    mine, all_of_them = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, os.cpu_count() or 1
    told = f"{mine} of {all_of_them} cores for this process"
    share = _group_cores()
    if share is not None and share < mine:
        return Line("cores", "warning", f"{told}, but its group may use {share:g}", "set OMP_NUM_THREADS to the group's cores a rank")
    return Line("cores", "ok", told)


def _group_cores() -> float | None:
    """Returns how many cores the control group may use, None without a limit."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> Line:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, whole = (int(fields[name].split()[0]) * 1024 / _GIB for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return Line("memory", "warning", "this system does not say", "watch it while a first run starts")
    told = f"{free:.1f} of {whole:.1f} GiB free"
    return (
        Line("memory", "ok", told)
        if free > 2
        else Line("memory", "warning", told, "end other programs: a rank takes 0.7 GiB before any data")
    )


def _shared_memory() -> Line:
    if not os.path.isdir("/dev/shm"):
        return Line("/dev/shm", "warning", "there is none", "mount a tmpfs there; NCCL passes data between GPUs of a machine through it")
    usage = shutil.disk_usage("/dev/shm")
    told = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free >= _GIB:
        return Line("/dev/shm", "ok", told)
    return Line(
        "/dev/shm", "warning", told, "give the container more, as docker run --shm-size=8g: NCCL passes data between GPUs through it"
    )


def _files() -> Line:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return Line("ulimit, open files", "ok", told)
    state, wanted = ("problem", "64 and more") if soft <= 64 else ("warning", f"{_LEAST_FILES}")
    return Line(
        "ulimit, open files", "problem" if state == "problem" else "warning", told, f"ulimit -n {_LEAST_FILES}; ranks need {wanted}"
    )


def _locked_memory() -> Line:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = f"{_limit(soft, 1024)}, at most {_limit(hard, 1024)} KiB"
    has_fast_net = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
    if soft == resource.RLIM_INFINITY or not has_fast_net:
        return Line("ulimit, memlock", "ok", told)
    return Line("ulimit, memlock", "warning", told, "ulimit -l unlimited (in Slurm: in slurmd's own unit): InfiniBand needs locked memory")


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit:,}"
