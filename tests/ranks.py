"""Runs a function on W real gloo ranks: one import of torchrec, one fork a rank, and a verdict in seconds."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess


class RankError(RuntimeError):
    """A rank raised, died or hung; the text names it and shows where."""


@dataclass
class _Rank:
    number: int
    process: ForkProcess
    pipe: Connection
    stack: Path  # where the rank writes its stack when asked


@dataclass
class _Outcome:
    number: int
    good: bool
    at_s: float  # when it failed, on the clock that all processes share; 0 for one that could not say
    answer: Any


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 180) -> list[Any]:
    """Returns what `fn(*args)` returned on each of `world_size` gloo ranks, in rank order.

    The ranks are forks of this process, so `fn` may be a closure and `args` need no pickling; only results are pickled.
    `fn` finds the default process group started, one torch thread, and RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set
    as torchrun sets them.

    Args:
        fn: what every rank runs.
        world_size: number of ranks (`W`).
        *args: passed on to `fn`.
        timeout_s: seconds after which ranks that have not ended are killed.

    Raises:
        RankError: a rank raised (with its traceback), died (with the signal or exit code), or hung (with its stack).
    """
    import torchrec.distributed.model_parallel  # noqa: F401 - once here instead of seconds in every fork

    gc.collect()
    torch.set_num_threads(1)  # a fork does not inherit the threads of a pool that has started
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(number, world_size, Path(folder), timeout_s, fn, args) for number in range(world_size)]
        try:
            results = _wait(ranks, timeout_s)
            _join(ranks)
            return results
        finally:
            for rank in ranks:
                _end(rank)


def _start(number: int, world_size: int, folder: Path, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Rank:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    stack = folder / f"stack-{number}"
    process = context.Process(target=_child, args=(number, world_size, folder, timeout_s, fn, args, theirs), name=f"rank-{number}")
    with warnings.catch_warnings():
        # Python 3.12+ warns of any thread at a fork; those of torch that exist here hold no lock that a rank takes.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        process.start()
    theirs.close()  # else the pipe of a dead rank would never read as ended
    return _Rank(number, process, ours, stack)


def _child(
    number: int, world_size: int, folder: Path, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    # Process groups and loaders that earlier tests left to the collector wait in their destructors for threads that a fork does not have.
    gc.freeze()
    os.setpgid(0, 0)  # so that whatever `fn` starts ends with the rank
    with (folder / f"stack-{number}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            sizes = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ.update({name: str(value) for name, value in sizes.items()})
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine whose own name does not resolve can still run the tests
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world_size, timeout=timeout)
            answer = pickle.dumps((True, 0.0, fn(*args)))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = pickle.dumps((False, time.monotonic(), f"raised\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
        faulthandler.unregister(signal.SIGUSR1)


def _wait(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    waiting = {rank.pipe: rank for rank in ranks}
    outcomes: list[_Outcome] = []
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        outcomes += [_read(waiting.pop(pipe)) for pipe in ready]  # type: ignore[call-overload]
        if any(not outcome.good for outcome in outcomes):
            raise RankError(_describe_failure(outcomes, waiting, len(ranks)))
        if not ready:
            raise RankError(_describe_hang(list(waiting.values()), len(ranks), timeout_s))
    return [outcome.answer for outcome in sorted(outcomes, key=lambda outcome: outcome.number)]


def _read(rank: _Rank) -> _Outcome:
    try:
        good, at_s, answer = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode or 0
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return _Outcome(rank.number, good=False, at_s=0.0, answer=f"{how} and returned nothing")
    return _Outcome(rank.number, good, at_s, answer)


def _describe_failure(outcomes: list[_Outcome], waiting: dict[Connection, _Rank], world_size: int) -> str:
    # A rank that fails takes its neighbours with it: gather those that follow at once, so that the first can be told from them.
    for pipe in connection.wait(list(waiting), 0.3):
        outcomes.append(_read(waiting.pop(pipe)))  # type: ignore[call-overload]
    first, *others = sorted((outcome for outcome in outcomes if not outcome.good), key=lambda outcome: outcome.at_s)
    lines = [f"rank {first.number} of {world_size} {first.answer}"]
    lines += [f"after it rank {other.number}: {other.answer.strip().splitlines()[-1]}" for other in others]
    return "\n".join(lines)


def _describe_hang(hung: list[_Rank], world_size: int, timeout_s: float) -> str:
    for rank in hung:
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.3)  # for faulthandler to write
    stacks = [f"--- rank {rank.number}\n{rank.stack.read_text()}" for rank in hung]
    numbers = ", ".join(str(rank.number) for rank in hung)
    return f"rank {numbers} of {world_size} had not ended after {timeout_s} s, and was killed here:\n" + "\n".join(stacks)


def _join(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.join(10)
        if rank.process.exitcode != 0:
            raise RankError(f"rank {rank.number} of {len(ranks)} returned, then did not end well: exit code {rank.process.exitcode}")


def _end(rank: _Rank) -> None:
    if rank.process.is_alive():
        os.killpg(rank.process.pid or 0, signal.SIGKILL)
    rank.process.join()
    rank.process.close()
    rank.pipe.close()
