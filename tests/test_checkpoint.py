"""A checkpoint is whole or not there: whatever moment its process is killed at, the former one or the new one can be loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distrag.checkpoint import change_extra, find_checkpoint, has_checkpoint, keep_checkpoint, load_checkpoint, read_extra, save_checkpoint
from distrag.config import read_config
from distrag.training.build import Job, build_job
from distrag.training.optim import build_optimizer
from distrag.world import start_world
from tests.ranks import RankError, run_ranks
from tests.training.runs import config, write_histories

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("checkpoint") / "store", 20)


def build(store: Path, run_dir: Path, **changes: Any) -> tuple[Job, Any]:
    job = build_job(read_config(config(store, run_dir, **changes)), start_world("cpu"))
    optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
    for _name, part in optimizer.optimizers:
        part.init_state()  # as the first step does
    return job, optimizer


def fill(job: Job, value: float) -> None:
    with torch.no_grad():
        for parameter in job.parallel.dense.values():
            parameter.fill_(value)
        for _row, _column, piece in job.parallel.item_shards("item"):
            piece.fill_(value)


def values_of(job: Job) -> set[float]:
    found = {float(v) for parameter in job.parallel.dense.values() for v in parameter.detach().view(-1)}
    return found | {float(v) for _row, _column, piece in job.parallel.item_shards("item") for v in piece.view(-1)}


def die_at(event: int) -> None:
    """Kills this process with signal 9 at the `event`-th thing that it does to files from here on."""
    seen = [0]

    def watch(name: str, given: tuple[Any, ...]) -> None:
        if name in FILE_EVENTS and not (name == "open" and str(given[0]).startswith(("/proc", "/sys", "/dev"))):
            seen[0] += 1
            if seen[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def is_killed(save: Any, *given: int) -> bool:
    """Runs a save in a process of its own; returns whether signal 9 ended it."""
    try:
        run_ranks(save, 1, *given)
    except RankError as error:
        if "SIGKILL" not in str(error):
            raise
        return True
    return False


def test_a_save_that_is_killed_at_any_file_it_touches_leaves_a_whole_checkpoint(store: Path, tmp_path: Path) -> None:
    last, best = tmp_path / "checkpoints" / "last", tmp_path / "checkpoints" / "best"

    def save(number: int, event: int) -> None:
        job, optimizer = build(store, tmp_path)
        if event:
            for path in (last, best):
                written = read_extra(path)["number"]
                assert written == number - 1 if path == last else written < number
                assert load_checkpoint(path, job.parallel, optimizer) == {"number": written}
                assert values_of(job) == {float(written)}
        fill(job, float(number))
        if event:
            die_at(event)
        save_checkpoint(last, job.parallel, optimizer, {"number": number}, job.world)
        keep_checkpoint(last, best, job.world)

    run_ranks(save, 1, 1, 0)
    killed, number = 0, 1
    for event in range(1, 200, 2 if "CI" in os.environ else 1):
        number = read_extra(last)["number"] + 1
        if not is_killed(save, number, event):
            break
        killed += 1
    assert killed > 15
    assert read_extra(best) == {"number": number}
    assert [path.name for path in last.parent.iterdir() if "." in path.name] == [], "nothing is left over"


def test_the_only_whole_checkpoint_is_not_removed_before_the_next_is_whole(store: Path, tmp_path: Path) -> None:
    """A save that was cut between its two renames leaves the former one under another name; a cut in the next save must not lose it."""
    path, old = tmp_path / "last", tmp_path / "last.old"

    def save(event: int) -> None:
        job, optimizer = build(store, tmp_path)
        if event:
            die_at(event)
        save_checkpoint(path, job.parallel, optimizer, {"event": event}, job.world)

    run_ranks(save, 1, 0)
    for event in range(1, 200, 6):
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        if not is_killed(save, event):
            return
        assert "event" in json.loads((find_checkpoint(path) / "state.json").read_text())
        if not path.exists():
            old.rename(path)
    pytest.fail("a save has no end")


def test_a_kept_checkpoint_does_not_change_with_the_one_it_was_kept_from(store: Path, tmp_path: Path) -> None:
    def go() -> None:
        job, optimizer = build(store, tmp_path)
        last, best = tmp_path / "last", tmp_path / "best"
        fill(job, 1.0)
        save_checkpoint(last, job.parallel, optimizer, {"step": 1}, job.world)
        keep_checkpoint(last, best, job.world)
        change_extra(last, {"step": 1, "more": True}, job.world)
        assert read_extra(best) == {"step": 1}
        fill(job, 2.0)
        save_checkpoint(last, job.parallel, optimizer, {"step": 2}, job.world)
        keep_checkpoint(last, best, job.world)
        fill(job, 3.0)
        save_checkpoint(last, job.parallel, optimizer, {"step": 3}, job.world)
        assert load_checkpoint(best, job.parallel, optimizer) == {"step": 2}
        assert values_of(job) == {2.0}

    run_ranks(go, 2)


def test_generators_go_on_where_they_were_on_every_rank(store: Path, tmp_path: Path) -> None:
    def go() -> tuple[list[float], list[float]]:
        job, optimizer = build(store, tmp_path)
        torch.manual_seed(40 + job.world.rank)
        torch.rand(3)
        save_checkpoint(tmp_path / "last", job.parallel, optimizer, {}, job.world)
        wanted = torch.rand(4).tolist()
        torch.manual_seed(0)
        load_checkpoint(tmp_path / "last", job.parallel, optimizer, generators_of=job.world)
        return wanted, torch.rand(4).tolist()

    first, second = run_ranks(go, 2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second


def test_the_count_of_lookups_goes_on_from_where_it_was(store: Path, tmp_path: Path) -> None:
    """Fused Adam of CUDA corrects its moments by it; FBGEMM's CPU groups count the same way."""

    def groups_of(job: Job) -> list[Any]:
        lookups = [lookup for module in job.parallel.model.modules() for lookup in getattr(module, "_lookups", [])]
        return [module for lookup in lookups for module in lookup.modules() if hasattr(module, "iter_cpu")]

    def go(step: int) -> list[tuple[int, int]]:
        job, optimizer = build(store, tmp_path, tables__cpu_kernel="fbgemm")
        if step:
            for number in range(step):
                job.parallel.model(job.collate(job.views["train"], np.arange(3), step=number))
            save_checkpoint(tmp_path / "last", job.parallel, optimizer, {}, job.world)
        else:
            load_checkpoint(tmp_path / "last", job.parallel, optimizer)
        return [(int(group.iter_cpu), int(group.iter)) for group in groups_of(job)]

    assert run_ranks(go, 2, 5) == [[(5, 5)]] * 2
    assert run_ranks(go, 1, 0) == [[(5, 5)]]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path / "last")
    with pytest.raises(ValueError, match="No whole checkpoint"):
        read_extra(tmp_path / "last")
    (tmp_path / "last").mkdir()
    assert not has_checkpoint(tmp_path / "last")
    (tmp_path / "last" / "state.json").write_text('{"step": ')
    with pytest.raises(ValueError, match=r"(?s)values of a checkpoint cannot be read.*state.json"):
        read_extra(tmp_path / "last")
