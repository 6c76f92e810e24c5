"""TorchX's Slurm scheduler, with what its release 0.7 gets wrong put right; `pyproject.toml` makes it TorchX's own `slurm`.

- A state such as `CANCELLED by 0` ends `status`, `log` and `list` in an assertion. Here states are read from squeue while a job is there,
  from sacct after that, and where there is no accounting from scontrol.
- Following a log asks sacct ten times a second for each machine.
- A requeued job empties its log; a step of Slurm 22.05 and later gets one core, whatever the job has; accounts and QOS cannot be given.

"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream, filter_regex
from torchx.schedulers.slurm_scheduler import SLURM_STATES, SlurmBatchRequest, SlurmScheduler
from torchx.specs import AppState, ReplicaStatus, Role, RoleStatus

from distrag.leaving import PREEMPTED, REFUSED
from distrag.problem import problem

ASK_S = 2.0
"""Seconds between two questions to Slurm about one job."""
_LIMIT_S = 30.0
_OPTIONS = {
    "account": "The account that the job is charged to.",
    "qos": "The quality of service to run the job under.",
    "reservation": "The reservation to take the machines from.",
}
_STATES = {
    **SLURM_STATES,
    "COMPLETING": AppState.RUNNING,
    "CONFIGURING": AppState.PENDING,
    "REQUEUE_FED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "SIGNALING": AppState.RUNNING,
    "SPECIAL_EXIT": AppState.PENDING,
    "STAGE_OUT": AppState.RUNNING,
    "STOPPED": AppState.PENDING,
}
_FIRST = (
    AppState.RUNNING,
    AppState.PENDING,
    AppState.FAILED,
    AppState.CANCELLED,
    AppState.UNKNOWN,
    AppState.SUCCEEDED,
)


@dataclass(frozen=True)
class Part:
    """What Slurm says of one machine of a job.

    Attributes:
        job: number of the job, without the part's own.
        name: such as `train-0`.
        said: the state in Slurm's words.
        host: where it runs; '' before it does.
        folder: the job's working directory.
    """

    job: str
    name: str
    said: str
    host: str
    folder: str

    @property
    def state(self) -> AppState:
        """The state in TorchX's words."""
        return _STATES.get(self.said.split()[0] if self.said.split() else "", AppState.UNKNOWN)

    @property
    def replica(self) -> tuple[str, int]:
        """Role and number of the replica."""
        role, _, number = self.name.rpartition("-")
        return (role, int(number)) if role and number.isdigit() else (self.name, 0)


_END = """
# {preempted}: stopped from outside, as by a job that goes first, and saved; it is not counted. {refused}: would be the same again.
again=$((exitcode != 0 && exitcode != {refused} && ${{SLURM_RESTART_COUNT:-0}} < {retries}))
if [ $exitcode -eq {preempted} ] || [ $again -eq 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $exitcode
"""


class _Batch(SlurmBatchRequest):
    """The job's script, with TorchX's last lines replaced: those start a job again that is refused, and not one that is pre-empted."""

    def materialize(self) -> str:
        """Returns the script."""
        script, told, _ = super().materialize().partition('echo "job exited with code $exitcode"')
        if not told:
            raise AssertionError("this is not the script of torchx 0.7")
        return f"{script}{told}" + _END.format(preempted=PREEMPTED, refused=REFUSED, retries=self.max_retries)


class Slurm(SlurmScheduler):
    """Jobs on Slurm."""

    def _run_opts(self) -> Any:
        options = super()._run_opts()
        for name, text in _OPTIONS.items():
            options.add(name, type_=str, help=text, default=None)
        return options

    def _submit_dryrun(self, app: Any, cfg: Any) -> Any:
        info = super()._submit_dryrun(app, cfg)
        info.request = _Batch(**{each.name: getattr(info.request, each.name) for each in dataclasses.fields(info.request)})
        for replica in info.request.replicas.values():
            replica.sbatch_opts |= {name: str(cfg[name]) for name in _OPTIONS if cfg.get(name)}
            replica.sbatch_opts["open-mode"] = replica.srun_opts["open-mode"] = "append"
            replica.srun_opts["error"] = replica.srun_opts["output"]
            if cores := replica.sbatch_opts.get("cpus-per-task"):
                replica.srun_opts["cpus-per-task"] = cores
        return info

    def schedule(self, dryrun_info: Any) -> str:
        """Returns the number of the job, now submitted.

        Raises:
            ValueError: Slurm does not take it, or is not there.
        """
        try:
            return str(super().schedule(dryrun_info)).partition(";")[0]
        except FileNotFoundError:
            raise no_slurm() from None
        except subprocess.CalledProcessError as error:
            todo = "read what sbatch says above; `sinfo` shows partitions, `distrag submit --dryrun` the script"
            raise problem(
                "Slurm does not take the job", got=f"sbatch ended with {error.returncode}", wanted="a job number", where="sbatch", todo=todo
            ) from None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Returns the state of a job and of its machines; None where Slurm knows no such job."""
        parts = find_parts(app_id)
        if not parts:
            return None
        roles: dict[str, Role] = {}
        told: dict[str, RoleStatus] = {}
        for part in parts:
            name, number = part.replica
            roles.setdefault(name, Role(name=name, num_replicas=0, image="")).num_replicas += 1
            status = ReplicaStatus(id=number, role=name, state=part.state, hostname=part.host)
            told.setdefault(name, RoleStatus(name, [])).replicas.append(status)
        state = _whole(parts)
        said = ", ".join(dict.fromkeys(part.said for part in parts))
        return DescribeAppResponse(app_id=app_id, roles=list(roles.values()), roles_statuses=list(told.values()), state=state, msg=said)

    def list(self) -> Sequence[ListAppResponse]:
        """Returns the jobs of the last seven days, each once."""
        week = ["-S", "now-7days"]
        found: dict[str, list[Part]] = {}
        for part in _ask_sacct(week) + _ask_squeue(["--me"]):
            found.setdefault(part.job, []).append(part)
        return [ListAppResponse(app_id=job, state=_whole(parts)) for job, parts in found.items()]

    def _cancel_existing(self, app_id: str) -> None:
        _run(["scancel", app_id])

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Returns the lines that replica k printed, on both streams, since the job was first started.

        Args:
            app_id: the job.
            role_name: role of the replica.
            k: number of the replica.
            regex: keeps lines in which it is found.
            since: not used.
            until: not used.
            should_tail: wait for more until the job has ended.
            streams: not used; both are in one file, in order.
        """
        lines = _follow(self, app_id, f"slurm-{app_id}-{role_name}-{k}.out", should_tail)
        return filter_regex(regex, lines) if regex else lines


def _whole(parts: Sequence[Part]) -> AppState:
    """Returns the state of a job whose parts have these."""
    states = {part.state for part in parts}
    return next(each for each in _FIRST if each in states)


def create_scheduler(session_name: str, **_: object) -> Slurm:
    """Returns the scheduler; TorchX calls this."""
    return Slurm(session_name)


def find_parts(job: str) -> list[Part]:
    """Returns what Slurm knows of a job, a line for each machine; nothing of an unknown one.

    Args:
        job: its number.

    Raises:
        ValueError: there is no Slurm, or it does not answer.
    """
    if not job.isdigit():
        return []
    return _ask_squeue(["-j", job]) or _ask_sacct(["-j", job]) or _ask_scontrol(job)


def _ask_squeue(words: list[str]) -> list[Part]:
    """Returns jobs that have not ended. An unknown number is an error to squeue, and none here."""
    lines = _run(["squeue", "-h", "-o", "%i|%j|%T|%N|%Z", *words], may_fail=True).splitlines()
    return [_part(line) for line in lines]


def _ask_sacct(words: list[str]) -> list[Part]:
    lines = _run(["sacct", "-X", "-n", "-P", "-o", "JobID,JobName,State,NodeList,WorkDir", *words], may_fail=True).splitlines()
    return [_part(line) for line in lines]


def _ask_scontrol(job: str) -> list[Part]:
    """Returns what the controller remembers of a job that has ended, for some minutes."""
    parts = []
    for line in _run(["scontrol", "show", "job", "-o", job], may_fail=True).splitlines():
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "JobState" in said:
            parts.append(Part(job, said["JobName"], said["JobState"], said.get("NodeList", ""), said.get("WorkDir", "")))
    return parts


def _part(line: str) -> Part:
    number, name, said, host, folder = (line.split("|") + [""] * 4)[:5]
    return Part(number.partition("+")[0], name, said, "" if host == "None assigned" else host, folder)


def _run(words: list[str], *, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise no_slurm() from None
    except subprocess.TimeoutExpired:
        todo = "ask whoever runs the cluster; `scontrol ping` tells whether its controller answers"
        raise problem("Slurm does not answer", got=f"nothing in {_LIMIT_S:.0f} s", wanted="an answer", where=words[0], todo=todo) from None
    if done.returncode and not may_fail:
        said = (done.stderr or done.stdout).strip()
        raise problem("Slurm refuses", got=said, wanted="an answer", where=" ".join(words), todo="mend what it says")
    return done.stdout


def no_slurm() -> ValueError:
    """Returns the error of a machine without Slurm's commands."""
    todo = "submit from a machine of the cluster, or run here with -s local_cwd"
    return problem("There is no Slurm here", got="no sbatch on PATH", wanted="Slurm's commands", where="this machine", todo=todo)


def _follow(scheduler: Slurm, job: str, name: str, waits: bool) -> Iterator[str]:
    parts = find_parts(job)
    folder = next((part.folder for part in parts if part.folder), "")
    path = Path(folder, name)
    rest, at, asked = "", 0, time.monotonic()
    while True:
        text, at = _read_from(path, at)
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
        if text:
            continue
        if not waits:
            break
        time.sleep(0.2)
        if time.monotonic() - asked > ASK_S:
            told, asked = scheduler.describe(job), time.monotonic()
            waits = told is not None and told.state in (AppState.PENDING, AppState.RUNNING)
    if rest:
        yield f"{rest}\n"


def _read_from(path: Path, at: int) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(at if at <= size else 0)
            data = file.read(1 << 20)
            return data.decode(errors="replace"), file.tell()
    except FileNotFoundError:
        return "", at
