"""The peak memory of a training step, by running it: on the CPU in a fresh process for each, on CUDA by the allocator's own count.

On the CPU a trial is a child of a server process that has imported everything and computed nothing, so it starts in a moment, and a
child that the kernel kills for want of memory takes nobody along. What counts is the largest resident set of the whole process (VmHWM,
reset after a first small step): interpreter, libraries, tables, optimizer state, activations, and the batches that the loader holds. It is
what a limit of a container or a job scheduler is compared with. Pages that the child shares with the server or maps from the store count
as well. On CUDA it is `max_memory_allocated`, plus what was in use on the GPU before (the context, other processes).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from distrag.config import RunConfig, read_config, to_dict
from distrag.problem import problem
from distrag.training.build import build_job
from distrag.training.trial import Trial, take_samples
from distrag.world import World, open_world

Ints = np.ndarray[Any, np.dtype[np.int64]]

COMPOSITIONS = ("longest", "shortest", "typical")
_STEPS, _STEPS_S = 16, 10.0  # most steps of a trial, and seconds after which it is enough
_SPARE = 1.25  # a trial this far above the limit is ended before it does harm


class Scales(Protocol):
    """What weighs a budget.

    Attributes:
        limit: bytes that a peak may reach.
        device: its name.
        whole: its memory, or what the machine has free, in bytes.
    """

    limit: int
    device: str
    whole: int

    def weigh(self, max_tokens: int) -> dict[str, int]:
        """Returns the peak in bytes of each composition, up to the first that exceeds the limit."""


def choose_samples(lengths: Ints, composition: str, max_tokens: int, max_samples: int | None) -> Ints:
    """Returns the samples of a full rank: the `longest` histories, the `shortest` (then empty ones), or a `typical` random draw.

    Args:
        lengths: of the view.
        composition: which of COMPOSITIONS.
        max_tokens: budget of the rank.
        max_samples: most samples of the rank; None for as many as tokens.
    """
    most = max_tokens if max_samples is None else max_samples
    if composition == "typical":
        order = np.random.default_rng(0).permutation(len(lengths))
    else:
        order = np.argsort(lengths, kind="stable")
        empty = int(np.count_nonzero(lengths == 0))
        order = order[::-1] if composition == "longest" else np.concatenate([order[empty:], order[:empty]])
    return take_samples(lengths, order, max_tokens, most)


def _weigh_all(composed: Callable[[str], int], first: str, limit: int) -> dict[str, int]:
    """Returns the peak of each composition, `first` first, up to the first that exceeds the limit."""
    peaks: dict[str, int] = {}
    for composition in sorted(COMPOSITIONS, key=lambda name: name != first):
        peaks[composition] = composed(composition)
        if peaks[composition] > limit:
            break
    return peaks


def _run_steps(trial: Trial, samples: Ints, peak: Callable[[], int]) -> int:
    """Returns the peak of repeated steps beside the batches that a loader holds.

    On the CPU memory comes back in pieces, so that the peak creeps upwards, by a tenth over the first steps: it is run until four steps
    in a row add less than 1 %.
    """
    config = trial.job.config
    batches = [trial.batch(samples) for _ in range(1 + (0 if config.debug else config.batching.prefetch))]
    started, most, calm = time.perf_counter(), 0, 0
    for i in range(_STEPS):
        trial.step(batches[i % len(batches)])
        now = peak()
        most, calm = max(most, now), 0 if now > 1.01 * most else calm + 1
        if calm == 4 or (i and time.perf_counter() - started > _STEPS_S):
            break
    return most


@contextmanager
def open_scales(config: RunConfig, limit_of: Callable[[int], int], spare: int) -> Iterator[Scales]:
    """Gives scales on the device of the config.

    Args:
        config: the run.
        limit_of: from the device's memory to the limit, both in bytes.
        spare: bytes that are allowed above the limit.
    """
    wants_cuda = config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())
    with open_world("cuda" if wants_cuda else "cpu") as world:
        if wants_cuda:
            yield _build_cuda_scales(config, world, limit_of, spare)
            return
        whole = world.free_bytes()
    yield _CpuScales(config, whole, limit_of(whole) + spare)


def _build_cuda_scales(config: RunConfig, world: World, limit_of: Callable[[int], int], spare: int) -> Scales:
    try:
        return _CudaScales(Trial(build_job(config, world)), limit_of, spare)
    except torch.cuda.OutOfMemoryError as error:
        todo = "free the GPU, lower model.dim or the encoder's sizes, or shard the tables over more ranks"
        got, wanted = " ".join(str(error).split())[:200], "room for the model and a step of one history"
        raise problem("The model does not fit the GPU", got=got, wanted=wanted, where=str(world.device), todo=todo) from None


class _CudaScales:
    def __init__(self, trial: Trial, limit_of: Callable[[int], int], spare: int) -> None:
        self.trial, device = trial, trial.device
        free, self.whole = torch.cuda.mem_get_info(device)
        self.outside = self.whole - free - torch.cuda.memory_reserved(device)
        self.limit, self.device = limit_of(self.whole) + spare, torch.cuda.get_device_name(device)
        self._worst = COMPOSITIONS[0]
        order = np.argsort(trial.lengths, kind="stable")
        trial.step(trial.batch(order[-1:]))  # makes the optimizers' states

    def weigh(self, max_tokens: int) -> dict[str, int]:
        peaks = _weigh_all(lambda composition: self._weigh(composition, max_tokens), self._worst, self.limit)
        self._worst = max(peaks, key=peaks.__getitem__)
        return peaks

    def _weigh(self, composition: str, max_tokens: int) -> int:
        device = self.trial.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        samples = choose_samples(self.trial.lengths, composition, max_tokens, self.trial.job.config.batching.max_samples)
        try:
            return self.outside + _run_steps(self.trial, samples, lambda: torch.cuda.max_memory_allocated(device))
        except torch.cuda.OutOfMemoryError:
            return max(self.limit + 1, self.outside + torch.cuda.max_memory_allocated(device))


class _CpuScales:
    def __init__(self, config: RunConfig, whole: int, limit: int) -> None:
        self.config, self.whole, self.limit, self.device = config, whole, limit, "the memory that this machine has free"
        self._worst = COMPOSITIONS[0]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def weigh(self, max_tokens: int) -> dict[str, int]:
        peaks = _weigh_all(lambda composition: self._weigh(composition, max_tokens), self._worst, self.limit)
        self._worst = max(peaks, key=peaks.__getitem__)
        return peaks

    def _weigh(self, composition: str, max_tokens: int) -> int:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(to_dict(self.config), composition, max_tokens, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            return self._wait(process, ours)
        finally:
            process.kill()
            process.join()
            process.close()
            ours.close()

    def _wait(self, process: ForkServerProcess, pipe: Connection) -> int:
        """Returns the peak that the trial tells, or one above the limit when it grows too large or is killed.

        Raises:
            ValueError: what the trial refuses.
            RuntimeError: it failed for another reason than memory.
        """
        seen = 0
        while not pipe.poll(0.02):
            seen = max(seen, _status(process.pid, "VmRSS"))
            if seen > _SPARE * self.limit:
                return seen
        try:
            kind, said = pipe.recv()
        except EOFError:
            process.join()
            if process.exitcode == -signal.SIGKILL:  # by the kernel, which had no memory left
                return max(seen, self.limit + 1)
            raise RuntimeError(f"a trial step ended with exit code {process.exitcode}") from None
        if kind == "peak":
            return int(said)
        if kind == "full":
            return max(seen, self.limit + 1)
        raise ValueError(said) if kind == "refused" else RuntimeError(f"a trial step failed\n{said}")


def _child(tree: dict[str, Any], composition: str, max_tokens: int, pipe: Connection) -> None:
    """Runs one trial and sends its peak, or why there is none."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # whoever has to go, it is this process
    try:
        pipe.send(("peak", _peak_of_step(read_config(tree), composition, max_tokens)))
    except ValueError as error:
        pipe.send(("refused", str(error)))
    except MemoryError:
        pipe.send(("full", ""))
    except Exception as error:
        full = "can't allocate memory" in str(error)
        pipe.send(("full", "") if full else ("failed", traceback.format_exc()))


def _peak_of_step(config: RunConfig, composition: str, max_tokens: int) -> int:
    with open_world("cpu") as world:
        trial = Trial(build_job(config, world))
        samples = choose_samples(trial.lengths, composition, max_tokens, config.batching.max_samples)
        trial.step(trial.batch(samples[:1]))  # makes the optimizers' states, loads the compiled kernels
        with contextlib.suppress(OSError):  # else the peak is that of building the job too
            Path("/proc/self/clear_refs").write_text("5")
        return _run_steps(trial, samples, lambda: _status(None, "VmHWM"))


def _status(pid: int | None, field: str) -> int:
    """Returns a size out of the kernel's account of a process, in bytes; 0 where it has gone."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    if found is None and field == "VmHWM":  # some sandboxed kernels keep no such account
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(found.split()[1]) * 1024 if found else 0
