"""What is said of gradients: the norm of each room, the same for every number of ranks, and a warning that names the likely cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distrag.config import read_config
from distrag.encoder.mean import Mean
from distrag.training.build import build_job
from distrag.training.gradients import FACTOR, GradientWatch
from distrag.training.loop import run_job
from distrag.world import start_world
from tests.ranks import run_ranks
from tests.training.runs import config, read_lines, write_histories


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("gradients") / "store", 60)


def train(store: Path, run: Path, world_size: int, **changes: Any) -> list[dict[str, Any]]:
    sections = config(store, run, encoder__dropout=0.0, **changes)
    run_ranks(lambda: run_job(build_job(read_config(sections), start_world("cpu"))), world_size)
    return [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]


def test_norms_of_all_rooms_do_not_depend_on_the_number_of_ranks_and_make_up_the_whole(store: Path, tmp_path: Path) -> None:
    one, two = (train(store, tmp_path / str(world), world, train__max_steps=4) for world in (1, 2))
    for first, second in zip(one, two, strict=True):
        norms = first["grad_norms"]
        assert set(norms) == {"encoder", "mix", "table kind", "vectors item", "vectors item:next"}, "shared negatives have none"
        assert norms == pytest.approx(second["grad_norms"], rel=1e-3)
        dense = [norms[room] for room in ("encoder", "mix", "table kind")]
        assert np.linalg.norm(dense) == pytest.approx(first["grad_norm"], rel=1e-4)


def test_a_gradient_many_times_its_usual_size_is_told_once() -> None:
    watch = GradientWatch()
    assert not any(watch.note(value) for value in np.random.default_rng(0).uniform(0.5, 2.0, 40))
    assert watch.note(1000.0) > FACTOR
    assert not watch.note(1000.0), "a hundred steps between warnings"
    assert GradientWatch().note(1e9) == 0.0, "the first steps are no measure"


def blow_up(monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """From step 30 on the gradient of one sample, or of all, is many times its size."""
    original, calls = Mean.forward, [0]

    def forward(self: Any, x: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        out = original(self, x, offsets, keys)
        if not (self.training and torch.is_grad_enabled()):
            return out
        calls[0] += 1
        if calls[0] == 30 and (share == "all" or dist.get_rank() == 0):
            rows = torch.ones(len(out), 1)
            first = int(offsets.diff().argmax())
            rows[slice(None) if share == "all" else slice(int(offsets[first]), int(offsets[first + 1]))] = 1e4
            out.register_hook(lambda grad: grad * rows)
        return out

    monkeypatch.setattr(Mean, "forward", forward)


@pytest.mark.parametrize(("share", "cause"), [("all", "the learning rate is probably too high"), ("one", "% of it; lower data.max_len")])
def test_an_explosion_is_told_with_its_likely_cause(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], share: str, cause: str
) -> None:
    blow_up(monkeypatch, share)
    changes = {"encoder__name": "mean", "tables__shard_rows": 1, "train__max_steps": 40, "train__num_epochs": 9}
    train(store, tmp_path / "run", 2, **changes)
    told = [line for line in capfd.readouterr().out.splitlines() if "times its usual size" in line]
    assert len(told) == 1, told
    assert cause in told[0]
