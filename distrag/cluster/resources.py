"""What a machine of a job has: by name, or by cores, GPUs and memory.

TorchX asks for 2 cores and 1 GB where nothing is said; here, what is not said is not asked for, and the scheduler's own default holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from torchx.specs import Resource

from distrag.cluster.sizes import Size
from distrag.problem import problem

GIB = 1024
"""Of TorchX's unit of memory, which it calls MB."""


def cpu_small() -> Resource:
    """Returns 4 cores and 14 GiB."""
    return Resource(cpu=4, gpu=0, memMB=14 * GIB)


def cpu_large() -> Resource:
    """Returns 32 cores and 120 GiB."""
    return Resource(cpu=32, gpu=0, memMB=120 * GIB)


def gpu_a100_1() -> Resource:
    """Returns an eighth of a machine with 8 A100."""
    return Resource(cpu=12, gpu=1, memMB=120 * GIB)


def gpu_a100_8() -> Resource:
    """Returns a machine with 8 A100."""
    return Resource(cpu=96, gpu=8, memMB=1000 * GIB)


def gpu_h100_1() -> Resource:
    """Returns an eighth of a machine with 8 H100."""
    return Resource(cpu=24, gpu=1, memMB=230 * GIB)


def gpu_h100_8() -> Resource:
    """Returns a machine with 8 H100."""
    return Resource(cpu=192, gpu=8, memMB=1900 * GIB)


RESOURCES: dict[str, Callable[[], Resource]] = {
    make.__name__: make for make in (cpu_small, cpu_large, gpu_a100_1, gpu_a100_8, gpu_h100_1, gpu_h100_8)
}
"""By name; `pyproject.toml` makes them known to TorchX as well. Numbers are what clouds give, less what the machine keeps for itself."""


@dataclass(frozen=True)
class Ask:
    """What the user asks of each machine.

    Attributes:
        name: a key of `RESOURCES`, or a named resource of TorchX; '' for none. The others change what it has.
        cpu: cores; 0 means one a rank, or what the name has.
        gpu: GPUs; 0 means none, or what the name has.
        memory: such as `64GiB`; '' asks for none, or what the name has.
    """

    name: str = ""
    cpu: int = 0
    gpu: int = 0
    memory: str = ""


def build_resource(ask: Ask, size: Size) -> Resource:
    """Returns what each machine of a job is to have.

    Args:
        ask: what the user asks for.
        size: of the job.

    Raises:
        ValueError: an unknown name, numbers that cannot be, or fewer GPUs than ranks on a machine.
    """
    named = _named(ask.name) if ask.name else Resource(cpu=size.ranks, gpu=0, memMB=0)
    for what, number in (("--cpu", ask.cpu), ("--gpu", ask.gpu)):
        if number < 0:
            raise problem("Not a number of things", got=number, wanted="0 or more", where=what, todo=f"set {what} to what a machine has")
    memory = parse_memory(ask.memory) if ask.memory else named.memMB
    resource = Resource(
        cpu=ask.cpu or named.cpu, gpu=ask.gpu or named.gpu, memMB=memory, capabilities=named.capabilities, devices=named.devices
    )
    if 0 < resource.gpu < size.ranks:
        raise problem(
            "A machine has fewer GPUs than ranks",
            got=f"{resource.gpu} GPUs, {size.ranks} ranks a machine",
            wanted="a GPU for each rank",
            where=f"-j {size}",
            todo=f"ask for -j {size.nodes}x{resource.gpu}, or for more GPUs",
        )
    return resource


def _named(name: str) -> Resource:
    from torchx.specs import named_resources

    if name in RESOURCES:
        return RESOURCES[name]()
    try:
        return named_resources[name]
    except KeyError:
        near = difflib.get_close_matches(name, RESOURCES, 1)
        wanted = f"one of {', '.join(RESOURCES)}, or one of TorchX's" + (f"; did you mean {near[0]!r}?" if near else "")
        todo = "choose one of these, or give --cpu, --gpu and --memory"
        raise problem("An unknown kind of machine", got=name, wanted=wanted, where="--resource", todo=todo) from None


_UNITS = {
    "": 1.0,
    "M": 1.0,
    "MB": 1.0,
    "MIB": 1.0,
    "G": 1024.0,
    "GB": 1024.0,
    "GIB": 1024.0,
    "T": 1024.0**2,
    "TB": 1024.0**2,
    "TIB": 1024.0**2,
}


def parse_memory(text: str) -> int:
    """Returns memory in MiB.

    Args:
        text: a number with M, G or T, with or without B or iB; all count by 1,024, as Slurm does. A bare number is MiB.

    Raises:
        ValueError: another text, or less than a MiB.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    mib = int(float(found[1]) * unit) if found and unit else 0
    if mib < 1:
        todo = "set --memory to what a machine is to give"
        raise problem("Not an amount of memory", got=text, wanted="such as 64GiB or 900MiB", where="--memory", todo=todo)
    return mib
