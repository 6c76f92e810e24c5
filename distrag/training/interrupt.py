"""SIGTERM and Ctrl-C while a run trains: the step is finished and saved, and all ranks leave together with a code that tells why."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch

from distrag.leaving import CTRL_C, PREEMPTED, Stopped
from distrag.training.metrics import MetricsWriter
from distrag.world import World


class Interrupt:
    """What asked this process to stop. Former handlers come back at the end of its block.

    Until `patient` is set nothing is worth saving, and a signal ends the run at once; from then on it only sets `signal`, which the run
    asks for. A second SIGTERM changes nothing (Slurm sends two). After a Ctrl-C, another one or a SIGTERM (which torchrun makes of a
    second Ctrl-C) ends the process at once, as does a second Ctrl-C after a SIGTERM.

    Attributes:
        signal: the first signal, 0 for none.
        patient: whether the run will come and look.
    """

    def __init__(self) -> None:
        self.signal, self.patient = 0, False
        self._tells = self._pressed = False
        self._former: dict[int, Any] = {}

    def listen(self, world: World) -> None:
        """Installs the handlers; not on another thread than the main one, which gets no signals, nor for a signal that is ignored."""
        self._tells = world.rank == 0
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            former = signal.getsignal(number)
            if former not in (signal.SIG_IGN, None):  # a shell's background job ignores Ctrl-C, and is to go on doing so
                self._former[number] = signal.signal(number, self._hear)

    def __enter__(self) -> Interrupt:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._pressed:
            _write("\x1b[?25h" if os.isatty(2) else "")  # the progress line has hidden the cursor
            os._exit(CTRL_C)
        self._pressed = number == signal.SIGINT
        if self.signal:
            return
        self.signal = number
        if not self.patient:
            said = f"stopped by {_name(number)} before the first step; there was nothing to save" if self._tells else ""
            raise Stopped(_code(number), _name(number), said)
        if self._tells:
            again = "; Ctrl-C again ends it at once, without saving" if number == signal.SIGINT else ""
            _write(f"\n{_name(number)}: the run stops after this step{again}\n")

    def leave(self, world: World, writer: MetricsWriter, phase: str, step: int, num_steps: int, epoch: int) -> Stopped:
        """Returns what all ranks are to raise now that the step is saved, and says where they stop. A collective: every rank calls it."""
        number = self.agreed(world)
        writer.write("stop", step, {"phase": phase, "epoch": epoch, "signal": _name(number)})
        where = f"after step {step} of {num_steps} ({phase}), in epoch {epoch}"
        writer.say(f"stopped by {_name(number)} {where}; all of it is saved, and the same command with --resume goes on from there")
        world.barrier()
        return Stopped(_code(number), _name(number), together=True)

    def asked(self) -> bool:
        """Returns whether this process was asked to stop."""
        return self.signal != 0

    def agreed(self, world: World) -> int:
        """Returns the signal that any rank has got, SIGTERM before SIGINT, 0 for none. A collective: every rank calls it."""
        return int(world.all_reduce_max(torch.tensor(self.signal, device=world.device)))


def _name(number: int) -> str:
    return signal.Signals(number).name


def _code(number: int) -> int:
    return CTRL_C if number == signal.SIGINT else PREEMPTED


def _write(text: str) -> None:
    os.write(2, text.encode())  # a handler may meet a print that is half done
