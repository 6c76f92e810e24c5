"""torchrun with exit codes that a scheduler can act on: `python -m distrag.cluster.agent ...` takes torchrun's words.

torchrun ends with 1 whatever happened, after a SIGTERM and a clean save too; a scheduler should start the one again and not the other. And
a second SIGTERM, as Slurm and srun send it, ends torchrun while its ranks still save.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from distrag.leaving import CTRL_C, PREEMPTED, REFUSED

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def run_agent(words: Sequence[str]) -> int:
    """Returns the exit code of the ranks that torchrun started.

    Args:
        words: of torchrun.

    Returns:
        75 after SIGTERM and its like, 130 after Ctrl-C, 2 where the ranks were given what cannot be, 1 after any other failure.
    """
    assert hasattr(api, "_terminate_process_handler"), "torch has another handler now: see that a second SIGTERM is not heard"
    api._terminate_process_handler = _stop_once  # type: ignore[assignment]
    try:
        torchrun([*_handled(), *words])
    except api.SignalException as stopped:
        number = signal.Signals(stopped.sigval)
        print(f"{number.name}: the ranks were asked to stop, and have", file=sys.stderr)
        return CTRL_C if number == signal.SIGINT else PREEMPTED
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        codes = {failure.exitcode for failure in failed.failures.values()}
        return codes.pop() if len(codes) == 1 and codes <= {REFUSED, PREEMPTED, CTRL_C} else 1
    return 0


def _handled() -> list[str]:
    """Returns torchrun's words for the signals that it hands on; one that it does not know ends it and leaves the ranks alone."""
    return ["--signals-to-handle", ",".join(each.name for each in _SIGNALS)]


def _stop_once(number: int, _: FrameType | None) -> NoReturn:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise api.SignalException(f"torchrun got {signal.Signals(number).name}", sigval=signal.Signals(number))


def main() -> NoReturn:
    """Is the process: ends at once, since Python's own end hears signals again."""
    code = run_agent(sys.argv[1:])
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
