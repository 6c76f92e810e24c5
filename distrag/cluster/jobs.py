"""Submitted jobs: their states, what they print, their end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchx.runner import Runner
from torchx.schedulers import get_scheduler_factories
from torchx.specs import NONE, AppState, AppStatus

from distrag.cluster.slurm import ASK_S, create_scheduler
from distrag.problem import problem

SCHEDULERS = ("local_cwd", "slurm", "kubernetes")
_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)


@dataclass(frozen=True)
class Told:
    """What is known of a job.

    Attributes:
        handle: as `distrag submit` prints it.
        state: in TorchX's words.
        said: in the scheduler's own words; '' where it has none.
        replicas: for each machine, role, number, state and host.
    """

    handle: str
    state: AppState
    said: str
    replicas: list[tuple[str, int, AppState, str]]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in _ENDED


@contextmanager
def open_runner() -> Iterator[Runner]:
    """Gives TorchX's Runner, with this package's Slurm, for as long as the block runs; jobs of this machine end with it."""
    with Runner("distrag", {**get_scheduler_factories(), "slurm": create_scheduler}) as runner:
        yield runner


def parse_handle(text: str) -> str:
    """Returns the handle of a job; a bare number is a job of Slurm.

    Raises:
        ValueError: no handle, or one of this machine, which only the process that started it can ask.
    """
    handle = f"slurm://distrag/{text}" if text.isdigit() else text
    scheme, found, rest = handle.partition("://")
    session, _, job = rest.partition("/")
    todo = "give what `distrag submit` printed, such as slurm://distrag/12, or a Slurm job's number"
    if not found or not session or not job or scheme not in SCHEDULERS:
        wanted = f"SCHEDULER://SESSION/JOB, the scheduler one of {', '.join(SCHEDULERS[1:])}"
        raise problem("Not a job", got=text, wanted=wanted, where="the command line", todo=todo)
    if scheme == "local_cwd":
        todo = "look at the terminal of `distrag submit`; Ctrl-C there stops the job, after a save"
        raise problem(
            "A job of this machine is known to its own terminal only", got=text, wanted="a cluster's job", where=scheme, todo=todo
        )
    return handle


def ask(runner: Runner, handle: str) -> Told:
    """Returns what the scheduler says of a job.

    Args:
        runner: from `open_runner`.
        handle: from `parse_handle`.

    Raises:
        ValueError: the scheduler knows no such job.
    """
    status: AppStatus | None = runner.status(handle)
    if status is None:
        todo = "`distrag jobs list` names the jobs of the last days"
        raise problem(
            "There is no such job", got=handle, wanted="a job that the scheduler knows", where=handle.partition(":")[0], todo=todo
        )
    replicas = [(each.role, each.id, AppState(int(each.state)), each.hostname) for role in status.roles for each in role.replicas]
    if not replicas and handle.startswith("local_cwd:"):  # which tells nothing of them
        app = runner.describe(handle)
        replicas = [(role.name, number, status.state, "") for role in (app.roles if app else []) for number in range(role.num_replicas)]
    said = "" if status.msg in (None, NONE) else str(status.msg)
    return Told(handle, status.state, said, sorted(replicas, key=lambda each: each[:2]))


def cancel(runner: Runner, handle: str) -> Told:
    """Returns what a job was before it was asked to end; one that has ended is left alone."""
    told = ask(runner, handle)
    if not told.has_ended:
        runner.cancel(handle)
    return told


def print_logs(runner: Runner, handle: str, *, follows: bool, print_line: Callable[[str], None] = print) -> Told:
    """Prints what all replicas of a job printed, each line with its replica in front where there are several; returns the job's state.

    Args:
        runner: from `open_runner`.
        handle: from `parse_handle`.
        follows: go on until the job has ended.
        print_line: is given each line, without its end.
    """
    told = ask(runner, handle)
    while follows and not told.replicas and not told.has_ended:  # a scheduler may need a while to know the machines
        time.sleep(ASK_S)
        told = ask(runner, handle)
    several = len(told.replicas) > 1
    errors: list[Exception] = []
    readers = [
        threading.Thread(target=_read, args=(runner, handle, role, number, follows, several, print_line, errors), daemon=True)
        for role, number, _, _ in told.replicas
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        while reader.is_alive():  # a join without a limit does not hear Ctrl-C
            reader.join(0.2)
    for error in errors:
        print(f"distrag jobs: {error}", file=sys.stderr)
    return _wait(runner, handle) if follows else told


def _read(
    runner: Runner,
    handle: str,
    role: str,
    number: int,
    follows: bool,
    several: bool,
    print_line: Callable[[str], None],
    errors: list[Exception],
) -> None:
    front = f"{role}/{number} | " if several else ""
    try:
        for line in runner.log_lines(handle, role, number, should_tail=follows):
            print_line(f"{front}{line.rstrip()}")
    except Exception as error:
        errors.append(error)


def _wait(runner: Runner, handle: str) -> Told:
    while not (told := ask(runner, handle)).has_ended:
        time.sleep(ASK_S)
    return told


def describe(told: Told) -> str:
    """Returns a job in a few lines."""
    said = f" ({told.said})" if told.said and told.said != told.state.name else ""
    lines = [f"{told.handle}: {told.state.name.lower()}{said}"]
    lines += [f"  {role}/{number:<4} {state.name.lower():10} {host}".rstrip() for role, number, state, host in told.replicas]
    return "\n".join(lines)


def as_json(told: Told) -> dict[str, Any]:
    """Returns a job as plain values."""
    replicas = [{"role": role, "replica": number, "state": state.name.lower(), "host": host} for role, number, state, host in told.replicas]
    return {"handle": told.handle, "state": told.state.name.lower(), "said": told.said, "replicas": replicas}


def list_jobs(runner: Runner, scheduler: str) -> list[tuple[str, str]]:
    """Returns handle and state of a scheduler's jobs, those of the last seven days on Slurm.

    Raises:
        ValueError: the scheduler is not there.
    """
    return [(f"{scheduler}://distrag/{each.app_id}", each.state.name.lower()) for each in runner.list(scheduler)]
