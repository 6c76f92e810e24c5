"""All that the doctor looks at, in the order in which one thing needs the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distrag.doctor.config_side import check_config
from distrag.doctor.line import Line
from distrag.doctor.machine import check_machine
from distrag.doctor.packages import check_packages, check_python
from distrag.doctor.schedulers import check_schedulers
from distrag.doctor.torch_side import check_exchange, check_fbgemm, check_torch


def examine(config: Sequence[str] = ()) -> Iterator[Line]:
    """Yields a line for everything that decides whether this machine can train, as it is found out.

    Args:
        config: words of `distrag train` whose config, store and run folder are looked at too; none are not.
    """
    yield check_python()
    yield from check_packages()
    yield from check_machine()
    lines, num_gpus = check_torch()
    yield from lines
    if lines[0].state == "ok":
        yield check_fbgemm("cpu")
        if num_gpus:
            yield check_fbgemm("cuda")
        yield check_exchange(num_gpus)
    if config:
        yield from check_config(config)
    yield from check_schedulers()
