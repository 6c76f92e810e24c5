"""SIGTERM and Ctrl-C: the step is saved, all ranks leave with a code that tells why, and a resume goes on as if nothing had been."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from distrag.leaving import CTRL_C, PREEMPTED, Stopped
from distrag.training.interrupt import Interrupt
from distrag.training.loop import train
from distrag.world import start_world
from tests.training.deaths import die
from tests.training.processes import run_processes
from tests.training.runs import config, losses_of, read_lines, write_histories
from tests.training.test_resume import last_of, same

REFIT = {"train__num_epochs": 1, "train__refit": True, "train__save_every": 0, "train__eval_every": 0}
SLOW = {"train__num_epochs": 1, "train__save_every": 0, "train__eval_every": 5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupt")
    write_histories(folder / "store", 120)
    return folder


def whole(runs: Path, name: str, world_size: int, keys: dict[str, Any]) -> Path:
    """Returns the run that was not interrupted, made once."""
    if not (runs / name).exists():
        assert not any(die(runs / name, "", "", launcher="processes", world_size=world_size, victim=0, **keys).codes)
    return runs / name / "run"


@pytest.mark.parametrize(
    ("moment", "turn", "how", "victim", "keys"),
    [
        ("forward", 4, "term", -1, SLOW),
        ("forward", 4, "int", 1, SLOW),
        ("saving", 1, "term", 0, SLOW),
        ("evaluation", 2, "term", 1, SLOW),
        ("evaluation", 2, "term", -1, REFIT),  # in the test, which comes after the refit
        ("forward", 14, "term", 0, REFIT),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_its_step_and_goes_on_bit_for_bit(
    runs: Path, tmp_path: Path, moment: str, turn: int, how: str, victim: int, keys: dict[str, Any]
) -> None:
    wanted = whole(runs, "refit" if keys is REFIT else "slow", 2, keys)
    (tmp_path / "store").symlink_to(runs / "store")
    seen = die(tmp_path / "cut", moment, how, launcher="processes", world_size=2, victim=victim, turn=turn, **keys)
    run = tmp_path / "cut" / "run"
    assert seen.codes == [CTRL_C if how == "int" else PREEMPTED] * 2
    assert seen.seconds < 30
    assert "Traceback" not in "".join(seen.said)
    assert f"stopped by SIG{how.upper()} after step" in seen.said[0]
    assert not (run / "errors").exists()
    stop = read_lines(run / "metrics.jsonl")[-1]
    state = last_of(run)
    assert (stop["kind"], stop["step"], stop["phase"]) == ("stop", state["step"], state["phase"])
    assert state["step"] == max(step for step, _ in losses_of(run, state["phase"]))
    again = die(tmp_path / "cut", "", "", launcher="processes", world_size=2, victim=0, train__resume=True, **keys)
    assert again.codes == [0, 0]
    same(run, wanted)
    assert [line["kind"] for line in read_lines(run / "metrics.jsonl")].count("stop") == 1


@pytest.mark.parametrize("victim", [-1, 1])
def test_a_run_that_is_asked_to_stop_at_its_start_ends_at_once_and_leaves_nothing(runs: Path, tmp_path: Path, victim: int) -> None:
    (tmp_path / "store").symlink_to(runs / "store")
    seen = die(tmp_path / "cut", "start", "term", launcher="processes", world_size=2, victim=victim, turn=1)
    assert seen.codes == [PREEMPTED] * 2
    assert "Traceback" not in "".join(seen.said)
    if victim == -1:
        assert "stopped by SIGTERM before the first step" in seen.said[0]
    assert not (tmp_path / "cut" / "run").exists()


def test_one_process_stops_too_and_its_handlers_are_those_of_before(runs: Path, tmp_path: Path) -> None:
    former = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        send_in_step(patch, 3, signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            train(config(runs / "store", tmp_path / "run"))
    assert (stopped.value.code, stopped.value.together) == (PREEMPTED, True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former
    assert last_of(tmp_path / "run")["step"] == 3
    train(config(runs / "store", tmp_path / "run", train__resume=True))
    train(config(runs / "store", tmp_path / "whole"))
    same(tmp_path / "run", tmp_path / "whole")


def send_in_step(patch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Sends this process a signal in the forward of a step."""
    from distrag.model import SequenceModel

    forward, steps = SequenceModel.forward, itertools.count(1)

    def sending(*given: Any, **named: Any) -> Any:
        if next(steps) == step:
            os.kill(os.getpid(), number)
        return forward(*given, **named)

    patch.setattr(SequenceModel, "forward", sending)


def test_on_another_thread_and_for_ignored_signals_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def listen() -> None:
        with Interrupt() as interrupt:
            interrupt.listen(start_world("cpu"))
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [before]
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            interrupt.listen(start_world("cpu"))
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_second_sigterm_changes_nothing() -> None:
    with Interrupt() as interrupt:
        interrupt.listen(start_world("cpu"))
        interrupt.patient = True
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # a first Ctrl-C after it only counts
        assert interrupt.signal == signal.SIGTERM


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, *[signal.SIGINT] * 2)]
)
def test_a_second_ctrl_c_ends_the_process_at_once(numbers: tuple[int, ...]) -> None:
    def wait() -> None:
        with Interrupt() as interrupt:
            interrupt.listen(start_world("cpu"))
            interrupt.patient = True
            for number in numbers:
                os.kill(os.getpid(), number)
        os._exit(0)

    assert run_processes(wait, 1).codes == [CTRL_C]
