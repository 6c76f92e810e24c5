"""A save is whole or not there: whatever moment its process is killed at, the former one or the new one can be loaded."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from distrag.checkpoint import Checkpoints, find_newest, has_checkpoint, load_checkpoint, newest_checkpoint, read_extra, save_checkpoint
from distrag.checkpoint import save as saving
from distrag.training.step import train_step
from tests.checkpoint.jobs import build, die_at, fill, hold_back, is_killed, loaded, slow_down
from tests.ranks import run_ranks
from tests.training.runs import write_histories


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("checkpoint") / "store", 20)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_is_killed_at_any_file_it_touches_leaves_a_whole_checkpoint(store: Path, tmp_path: Path, background: bool) -> None:
    """Files, hashes, manifest, the renames, the links of the best and the removal of the oldest; twice over what the kill before left."""
    folder = tmp_path / "checkpoints"
    (tmp_path / "config.yaml").write_text("a: 1\n")

    def go() -> int:
        job, optimizer = build(store, tmp_path)
        options = {"keep": 1, "background": background, "contract": [tmp_path / "config.yaml"]}

        def save(number: int, event: int) -> None:
            checkpoints = Checkpoints(folder, job.world, **options)
            fill(job, optimizer, float(number))
            if event:
                die_at(event)
            state = {"phase": "train", "step": number}
            checkpoints.save(f"step-{number}", job.parallel, optimizer, state, kept="best")
            checkpoints.update({**state, "more": True}, kept="best")

        save(1, 0)
        number = 1
        for event in range(1 + background, 300, 2 if "CI" in os.environ else 1):
            killed = is_killed(lambda number=number + 1, event=event: save(number, event))
            found = find_newest(folder, job.world)
            assert found is not None
            assert loaded(job, optimizer, found) in [(n, {float(n)}) for n in (number, number + 1)], event
            best = read_extra(folder / "best")["step"]
            assert loaded(job, optimizer, folder / "best") == (best, {float(best)})
            number = found.state["step"]
            assert best <= number
            if not killed:
                assert names(folder) == ["best", f"step-{number}"], "nothing is left over"
                return event
            resumed = Checkpoints(folder, job.world, **options)
            resumed.newest = found.path
            resumed.keep_newest("best")  # as a run does that was cut before it could
        return 0

    assert run_ranks(go, 1)[0] > 50


def test_a_save_that_is_cut_at_any_byte_leaves_the_former_one(store: Path, tmp_path: Path) -> None:
    def go() -> int:
        job, optimizer = build(store, tmp_path)
        fill(job, optimizer, 1.0)
        save_checkpoint(tmp_path / "step-1", job.parallel, optimizer, {"step": 1}, job.world)
        largest = max(path.stat().st_size for path in (tmp_path / "step-1").iterdir())

        def save(size: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file that would grow beyond it ends the process, in the middle of a write
            fill(job, optimizer, 2.0)
            save_checkpoint(tmp_path / "step-2", job.parallel, optimizer, {"step": 2}, job.world)

        sizes = [0, 1, *np.random.default_rng(0).integers(2, largest, 20).tolist(), largest - 1]
        for size in sizes:
            assert is_killed(lambda size=size: save(size))
            assert newest_checkpoint(tmp_path) == tmp_path / "step-1"
        assert loaded(job, optimizer, tmp_path / "step-1") == (1, {1.0})
        assert not is_killed(lambda: save(largest))
        return int(read_extra(tmp_path / "step-2")["step"])

    assert run_ranks(go, 1) == [2]


def test_the_only_whole_checkpoint_is_not_removed_before_the_next_is_whole(store: Path, tmp_path: Path) -> None:
    """A save that was cut between its two renames leaves the former one under another name; a cut in the next save must not lose it."""
    path, old = tmp_path / "step-1", tmp_path / "step-1.old"

    def go() -> None:
        job, optimizer = build(store, tmp_path)
        save_checkpoint(path, job.parallel, optimizer, {"step": 1}, job.world)

        def save(event: int) -> None:
            die_at(event)
            Checkpoints(tmp_path, job.world, keep=1).save("step-1", job.parallel, optimizer, {"phase": "train", "step": 1})

        for event in range(1, 200, 3):
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            if not is_killed(lambda event=event: save(event)):
                return
            assert find_newest(tmp_path, job.world) is not None
            if not has_checkpoint(path) or not path.exists():
                old.rename(path)
        pytest.fail("a save has no end")

    run_ranks(go, 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_kept_checkpoint_does_not_change_with_the_one_it_was_kept_from(store: Path, tmp_path: Path, background: bool) -> None:
    def go() -> None:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(tmp_path / "checkpoints", job.world, keep=2, background=background)
        for step in range(1, 6):
            fill(job, optimizer, float(step))
            state = {"phase": "train", "step": step}
            checkpoints.save(f"step-{step}", job.parallel, optimizer, state, kept="best" if step == 2 else "")
            fill(job, optimizer, -7.0)  # as the next steps of a training would
            if step == 2:
                checkpoints.update({**state, "more": True})
        checkpoints.wait()
        job.world.barrier()
        assert read_extra(tmp_path / "checkpoints" / "best") == {"phase": "train", "step": 2}
        assert loaded(job, optimizer, tmp_path / "checkpoints" / "best") == (2, {2.0})
        assert loaded(job, optimizer, tmp_path / "checkpoints" / "step-4") == (4, {4.0})

    run_ranks(go, 2)
    assert names(tmp_path / "checkpoints") == ["best", "step-4", "step-5"]


def test_steps_of_a_line_that_the_run_has_left_go_with_the_next_save(store: Path, tmp_path: Path) -> None:
    def go() -> None:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(tmp_path, job.world, keep=2)
        for name in ("step-2", "step-4", "step-40", "refit-step-1"):
            save_checkpoint(tmp_path / name, job.parallel, optimizer, {}, job.world)
        (tmp_path / "step-30.part-1-1").mkdir()
        checkpoints.save("step-6", job.parallel, optimizer, {})
        assert names(tmp_path) == ["step-4", "step-6"]
        checkpoints.save("refit-step-1", job.parallel, optimizer, {})
        assert names(tmp_path) == ["refit-step-1", "step-6"]

    run_ranks(go, 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_fails_on_one_rank_is_raised_on_all_at_the_next_save_and_costs_no_checkpoint(
    store: Path, tmp_path: Path, background: bool
) -> None:
    def go() -> list[str]:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(tmp_path, job.world, keep=1, background=background)
        fill(job, optimizer, 1.0)
        checkpoints.save("step-1", job.parallel, optimizer, {"phase": "train", "step": 1})
        checkpoints.wait()
        fill(job, optimizer, 2.0)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if job.world.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))  # stands for a full disk
        if background:
            checkpoints.save("step-2", job.parallel, optimizer, {"phase": "train", "step": 2})
        with pytest.raises(ValueError, match="A checkpoint cannot be written") as caught:
            checkpoints.save("step-3", job.parallel, optimizer, {"phase": "train", "step": 3})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found = find_newest(tmp_path, job.world)
        assert found is not None
        assert loaded(job, optimizer, found) == (1, {1.0})
        fill(job, optimizer, 4.0)
        checkpoints.save("step-4", job.parallel, optimizer, {"phase": "train", "step": 4})
        checkpoints.wait()
        return [str(caught.value), *names(tmp_path)]

    (first, *rest), (second, *_) = run_ranks(go, 2, timeout_s=60)
    assert "rank 1" in first
    assert "File too large" in first
    assert "File too large" in second
    assert rest == ["step-4"]


def test_steps_go_on_beside_a_save_that_is_slow_on_one_rank(store: Path, tmp_path: Path) -> None:
    """In their own order of collectives; the next save waits."""
    folder, gate = tmp_path / "checkpoints", tmp_path / "gate"

    def go() -> None:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(folder, job.world, keep=1, background=True)
        if job.world.rank == 0:
            hold_back(".distcp", gate)
        checkpoints.save("step-1", job.parallel, optimizer, {"phase": "train", "step": 1})
        for step in range(5):
            batch = job.collate(job.views["train"], np.arange(3 + job.world.rank), step=step, global_count=5.0)
            train_step(job.parallel, optimizer, batch, job.world)
            job.world.all_gather_object(step)
        assert not has_checkpoint(folder / "step-1")
        job.world.on_first(gate.touch)
        checkpoints.save("step-2", job.parallel, optimizer, {"phase": "train", "step": 2})
        assert has_checkpoint(folder / "step-1")
        checkpoints.wait()

    run_ranks(go, 2, timeout_s=60)
    assert names(folder) == ["step-2"]


def test_without_memory_for_a_copy_a_save_is_written_in_the_way_and_all_ranks_know(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_ROOM", 1e-9)

    def go() -> bool:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(tmp_path / "checkpoints", job.world, background=True)
        checkpoints.save("step-1", job.parallel, optimizer, {"phase": "train", "step": 1})
        return has_checkpoint(tmp_path / "checkpoints" / "step-1") and not checkpoints.background

    assert run_ranks(go, 2) == [True, True]
    assert capfd.readouterr().out.count("written in the way of training") == 1


def test_ranks_wait_together_for_a_save_in_their_way_that_is_slow_on_one(store: Path, tmp_path: Path) -> None:
    def go() -> bool:
        job, optimizer = build(store, tmp_path)
        if job.world.rank == 0:
            slow_down("__0_0.distcp", 1.0)
        save_checkpoint(tmp_path / "step-1", job.parallel, optimizer, {}, job.world)
        return has_checkpoint(tmp_path / "step-1")

    assert run_ranks(go, 2, timeout_s=60) == [True, True]


def test_a_run_that_ends_in_an_error_does_not_wait_for_a_slow_save(store: Path, tmp_path: Path) -> None:
    def go() -> float:
        job, optimizer = build(store, tmp_path)
        checkpoints = Checkpoints(tmp_path / "checkpoints", job.world, background=True)
        if job.world.rank == 0:
            slow_down(".distcp", 20.0)
        started = time.monotonic()
        checkpoints.save("step-1", job.parallel, optimizer, {"phase": "train", "step": 1})
        checkpoints.abandon(0.5)
        return time.monotonic() - started

    assert max(run_ranks(go, 2, timeout_s=30)) < 10


def test_generators_go_on_where_they_were_on_every_rank(store: Path, tmp_path: Path) -> None:
    def go() -> tuple[list[float], list[float]]:
        job, optimizer = build(store, tmp_path)
        torch.manual_seed(40 + job.world.rank)
        torch.rand(3)
        save_checkpoint(tmp_path / "last", job.parallel, optimizer, {}, job.world)
        wanted = torch.rand(4).tolist()
        torch.manual_seed(0)
        load_checkpoint(tmp_path / "last", job.parallel, optimizer, job.world, generators=True)
        return wanted, torch.rand(4).tolist()

    first, second = run_ranks(go, 2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second


def test_ranks_share_what_all_hold_alike(store: Path, tmp_path: Path) -> None:
    """One rank that writes all of the dense part would write twice as long as the others."""

    def go() -> None:
        job, optimizer = build(store, tmp_path, model__dim=64, encoder__num_layers=4)
        save_checkpoint(tmp_path / "last", job.parallel, optimizer, {}, job.world)

    run_ranks(go, 2)
    sizes = [os.path.getsize(tmp_path / "last" / f"__{rank}_0.distcp") for rank in range(2)]
    assert max(sizes) < 1.1 * min(sizes)
