"""The world of ranks: who am I, where is my device, and the few collectives that rooms are given.

One process is a world of size 1: a process group always exists, over an in-memory store when torchrun did not start us. In an open world
a rank that fails or dies ends the others soon, with an error that names it. This is the only file that reads the environment.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from distrag.launched import Launch, join_launches, launch_here
from distrag.leaving import RanksFailed, Stopped, leaving_error, verdict_error
from distrag.peers import Peers, Verdict
from distrag.problem import problem

_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks.

    Attributes:
        rank: number of this process, 0-based.
        size: number of processes (`W`).
        local_rank: number of this process on its host.
        local_size: number of processes on its host.
        device: where this rank computes.
        started_here: whether `start_world` started the process group, and `end_world` therefore ends it.
        peers: who of the ranks lives; in a world of one rank, and in one that was not opened, it watches nobody.
        launch: what started the ranks; nothing in a world that was not opened.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    started_here: bool = True
    peers: Peers = field(default_factory=lambda: Peers(0, [socket.gethostname()]), compare=False, repr=False)
    launch: Launch = field(default_factory=Launch)

    def free_bytes(self) -> int:
        """Returns how many bytes the device (its host, on CPU) has free; the smallest answer of all ranks."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else _available_bytes()
        return -int(self.all_reduce_max(torch.tensor(-free, device=self.device)))

    def free_host_bytes(self) -> int:
        """Returns how many bytes of its host's memory a rank may take, its share of what is free; the smallest answer of all ranks."""
        return -int(self.all_reduce_max(torch.tensor(-(_available_bytes() // self.local_size), device=self.device)))

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value` after adding every other rank's to it, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.SUM)
        return value

    def all_reduce_max(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value` after taking the elementwise maximum over all ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the rank's row of every rank's `value` `[W, ...]`, in rank order."""
        if self.size == 1:
            return value.clone()
        out = torch.empty_like(value)
        dist.all_to_all_single(out, value.contiguous())
        return out

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's `value` (equal shapes) in rank order."""
        if self.size == 1:
            return [value]
        out = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(out, value.contiguous())
        return out

    def all_gather_uneven(self, value: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Returns every rank's `value` in rank order, where rank r holds `sizes[r]` rows.

        Args:
            value: `[sizes[rank], ...]`, this rank's rows.
            sizes: rows of each rank; the same list on every rank (the plan knows it).
        """
        most = max(sizes)
        padded = value.new_zeros((most, *value.shape[1:]))
        padded[: value.shape[0]] = value
        return [part[:size] for part, size in zip(self.all_gather(padded), sizes, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's picklable `value` in rank order."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's picklable `value` on every rank."""
        return self.all_gather_object(value)[0] if self.size > 1 else value

    def barrier(self) -> None:
        """Returns once every rank is here."""
        if self.size > 1:
            dist.barrier()

    def on_first(self, act: Callable[[], _T]) -> _T | None:
        """Returns what `act` gives on rank 0, None elsewhere; when it fails there, every rank raises.

        Raises:
            ValueError: a file could not be read or written, or whatever `act` refuses.
        """
        value: _T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = act()
            except OSError as caught:
                todo = "free or unlock the path, or choose another folder"
                error = problem(
                    "A file cannot be written", got=caught.strerror, wanted="a writable place", where=caught.filename, todo=todo
                )
            except Exception as caught:
                error = caught
        self.agree(error)
        return value

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when any rank has an error, so that no rank waits for one that left.

        Raises:
            ValueError: this rank's own error, or the first other rank's, with its rank named.
        """
        errors = self.all_gather_object(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise ValueError(f"rank {rank}: {text}")


def agreed(world: World, build: Callable[[], _T]) -> _T:
    """Returns what `build` gives; when it fails on any rank, every rank raises instead of waiting for that one."""
    value, error = None, None
    try:
        value = build()
    except Exception as caught:
        error = caught
    world.agree(error)
    return value  # type: ignore[return-value]


def start_world(device: str = "auto", *, timeout_s: float = 300.0) -> World:
    """Returns this rank's World, starting the process group unless one runs already.

    Args:
        device: `auto` (CUDA where there is one), `cpu` or `cuda`.
        timeout_s: how long a collective may wait for the other ranks, in seconds.

    Raises:
        ValueError: CUDA was asked for and there is none, or there are fewer GPUs than local ranks.
        RanksFailed: not all ranks came in time.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _check_launch(size)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    chosen = _device(device, local_rank)
    torch.set_flush_denormal(True)  # subnormals cost up to 5.8x in long GRUs
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, chosen, started_here=False)
    # The object collectives travel on gloo, tensors on nccl where the device is a GPU.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=timeout_s)
    _end_with_agent()
    if size > 1:
        _join_others(backend, limit)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        rank, size, local_rank, local_size = 0, 1, 0, 1
    return World(rank, size, local_rank, local_size, chosen)


def launched_size() -> int:
    """Returns how many processes a launcher says it has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _join_others(backend: str, limit: datetime.timedelta) -> None:
    """Starts the process group of several ranks."""
    try:
        with _signals(signal.SIG_DFL):  # this waits in C++, where Python's handlers do not run
            dist.init_process_group(backend, timeout=limit)
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise RanksFailed(f"the ranks have not found each other within {limit.total_seconds():.0f} s: {first}") from None


def _end_with_agent() -> None:
    """Asks the kernel for a SIGTERM when the torchrun agent dies: nobody watches orphans, and they keep the run's folder locked."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _check_launch(size: int) -> None:
    if size > 1 and "MASTER_ADDR" not in os.environ and not dist.is_initialized():
        todo = "start with torchrun, or unset WORLD_SIZE for a single process"
        raise problem(
            "Half a launcher", got=f"WORLD_SIZE={size}, no MASTER_ADDR", wanted="both or neither", where="the environment", todo=todo
        )


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts page cache as free, which sysconf does not
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise problem(
            "No GPU for this rank",
            got=f"{count} GPUs, local rank {local_rank}",
            wanted="a GPU for each local rank",
            where="train.device",
            todo="start as many processes as there are GPUs, or set --train.device=cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def join_world(rank: int, size: int, meeting: Path, device: str = "auto", *, timeout_s: float = 300.0) -> Iterator[World]:
    """Gives a World to one of several processes that a command has started on this machine itself, for as long as the block runs.

    Args:
        rank: number of this process.
        size: how many there are.
        meeting: a file that does not exist yet, the same for all of them; they find each other there.
        device: as for `start_world`.
        timeout_s: as for `start_world`.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else is to be reached, and the machine's own name may not resolve
    backend = "cpu:gloo,cuda:nccl" if _device(device, rank).type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=meeting.absolute().as_uri(), rank=rank, world_size=size, timeout=limit)
    try:
        with open_world(device, timeout_s=timeout_s) as world:
            yield world
            world.barrier()
    finally:
        _leave()


def end_world(world: World) -> None:
    """Ends the process group that `start_world` started, after a last barrier; without it good runs can end in SIGABRT."""
    if world.started_here and dist.is_initialized():
        world.barrier()
        _leave()


def _leave() -> None:
    dist.destroy_process_group()
    torch.set_flush_denormal(False)


@contextmanager
def open_world(device: str = "auto", *, timeout_s: float = 300.0) -> Iterator[World]:
    """Gives a World for as long as the block runs.

    A rank that fails leaves at once, without the barrier, and says so. The others do not wait for it: within seconds they raise
    RanksFailed, which names the rank that failed or died first, its host and its error.

    Args:
        device: as for `start_world`.
        timeout_s: as for `start_world`.

    Raises:
        RanksFailed: another rank failed first.
        Stopped: another rank was stopped first.
    """
    world = start_world(device, timeout_s=timeout_s)
    world = _meet(world) if world.size > 1 else dataclasses.replace(world, launch=launch_here(os.environ))
    try:
        yield world
        if world.started_here:
            world.barrier()
    except BaseException as error:
        with _signals(signal.SIG_IGN):  # torchrun sends one to the ranks that outlive another
            told = leaving_error(error, world.peers)
            tell_torchrun(told)
        if world.started_here:
            _leave()
        if told is error:
            raise
        raise told from None
    world.peers.close()
    if world.started_here:
        _leave()


def _meet(world: World) -> World:
    """Returns the world whose ranks watch each other. A collective."""
    peers = Peers.meet(world.rank, world.all_gather_object, os.environ.get("MASTER_ADDR", "localhost"))
    missed = [rank for rank in range(world.size) if rank not in peers.watched]
    if missed and world.rank == 0:
        ranks, hosts = ", ".join(map(str, missed)), ", ".join(dict.fromkeys(peers.hosts[rank] for rank in missed))
        print(f"rank {ranks} (host {hosts}) cannot reach rank 0 beside the process group: should it die, its name is not known", flush=True)

    def end(verdict: Verdict) -> None:
        error = verdict_error(verdict, peers)
        print(f"distrag, rank {world.rank}: {error if isinstance(error, RanksFailed) else 'stopped'}", file=sys.stderr, flush=True)
        if any(failure.rank == world.rank for failure in verdict):
            frames = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
            print("it hangs here, the innermost call last:", *frames[-8:], sep="\n", file=sys.stderr, flush=True)
        tell_torchrun(error)
        os._exit(error.code if isinstance(error, Stopped) and isinstance(error.code, int) else 1)

    peers.on_stuck = end
    return dataclasses.replace(world, peers=peers, launch=join_launches(world.all_gather_object(launch_here(os.environ))))


@contextmanager
def _signals(handler: signal.Handlers) -> Iterator[None]:
    """Gives SIGTERM and SIGINT another handler for as long as the block runs; on another thread than the main one it cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    changed = [number for number, old in former.items() if old not in (None, signal.SIG_IGN)]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, former[number])


def tell_torchrun(error: BaseException) -> None:
    """Leaves an error where torchrun takes the causes of its summary from; does nothing where no torchrun asked for it."""
    if isinstance(error, SystemExit | KeyboardInterrupt) or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        if error.__traceback__ is None:  # the handler writes the traceback of what is being handled: not that of another error
            raise error from None
        get_error_handler().record_exception(error)
    except type(error):
        get_error_handler().record_exception(error)
