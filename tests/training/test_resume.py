"""A run that is cut goes on as if it had not been: same losses on the same ranks, every sample once on any."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distrag.checkpoint import has_checkpoint, load_checkpoint, newest_checkpoint, read_extra
from distrag.config import read_config
from distrag.data.store import open_store
from distrag.training.build import build_job
from distrag.training.evaluate_run import evaluate_run
from distrag.training.loop import run_job, train
from distrag.training.optim import build_optimizer
from distrag.world import open_world, start_world
from tests.embedding.test_tables import full_tables
from tests.ranks import run_ranks
from tests.training.runs import Reaches, config, cut, faults_of, losses_of, read_lines, samples_of, write_histories

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("resume") / "store", NUM_SAMPLES)


class Cut(Exception):
    """What stands for the end of a process."""


class _Cutting:
    """A collate in which the process ends: when it builds the `turn`-th batch of a step, for training or for an evaluation."""

    def __init__(self, whole: Any, epoch: int, step: int, *, training: bool, turn: int) -> None:
        self.whole, self.at, self.turns = whole, (epoch, step, training), turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.turns -= (named.get("epoch"), named.get("step"), named.get("training")) == self.at
        if not self.turns:
            raise Cut
        return self.whole(*given, **named)


def train_until(sections: dict[str, Any], epoch: int, step: int, *, training: bool = True, turn: int = 1) -> None:
    """Trains on this rank, and is cut before a step, or in an evaluation, without a chance to save."""
    with open_world("cpu") as world:
        job = build_job(read_config(sections), world)
        cutting = dataclasses.replace(job, collate=_Cutting(job.collate, epoch, step, training=training, turn=turn))
        with pytest.raises(Cut):
            run_job(cutting)


def same(found: Path, wanted: Path) -> None:
    """Checks that two runs logged the same: losses bit for bit, evaluations, samples of every step, results."""
    assert losses_of(found) == losses_of(wanted)
    assert losses_of(found, "refit") == losses_of(wanted, "refit")
    held_out = [[line for line in read_lines(run / "metrics.jsonl") if line["kind"] in ("valid", "test")] for run in (found, wanted)]
    assert held_out[0] == held_out[1]
    assert samples_of(found) == samples_of(wanted)
    assert samples_of(found, "refit") == samples_of(wanted, "refit")
    results = [json.loads((run / "result.json").read_text()) for run in (found, wanted)]
    for result in results:
        del result["seconds"], result["run_dir"]
    assert results[0] == results[1]


def last_of(run_dir: Path) -> dict[str, Any]:
    newest = newest_checkpoint(run_dir / "checkpoints")
    assert newest is not None
    return read_extra(newest)


@pytest.mark.parametrize(
    ("world_size", "cuts"),
    [(1, [(0, 3), (0, 4), (0, 7), (1, 0), (1, 2)]), (2, [(0, 3), (0, 4), (0, 7), (1, 0), (1, 2)]), (4, [(0, 3), (0, 7)])],
)
def test_resumes_in_one_epoch_and_at_its_end_repeat_nothing(
    store: Path, tmp_path: Path, world_size: int, cuts: list[tuple[int, int]]
) -> None:
    keys = {"train__save_every": 2}
    run_ranks(lambda: train(config(store, tmp_path / "whole", **keys)), world_size)
    end = len(samples_of(tmp_path / "whole")[0])
    saved = []
    for number, (epoch, step) in enumerate(cuts):
        sections = config(store, tmp_path / "cut", train__resume=number > 0, **keys)
        run_ranks(lambda sections=sections, at=(epoch, step): train_until(sections, *at), world_size)
        # The best state is saved with its evaluation at the end of the epoch.
        saved.append(end if (epoch, step) == (1, 0) else (epoch * end + step) // 2 * 2)
        assert last_of(tmp_path / "cut")["step"] == saved[-1]
    run_ranks(lambda: train(config(store, tmp_path / "cut", train__resume=True, **keys)), world_size)
    same(tmp_path / "cut", tmp_path / "whole")
    assert not faults_of(tmp_path / "cut", NUM_SAMPLES, 2)
    assert [line["step"] for line in read_lines(tmp_path / "cut" / "metrics.jsonl") if line["kind"] == "resume"] == saved


def test_early_stopping_and_the_best_state_survive_cuts_in_evaluations(store: Path, tmp_path: Path) -> None:
    keys = {"train__num_epochs": 30, "train__eval_every": 3, "train__patience": 2, "train__save_every": 3, "optim__lr": 0.3}
    whole = train(config(store, tmp_path / "whole", **keys))
    assert whole.num_steps < 30 * 9, "it stops early"
    evaluations = whole.num_steps // 3
    for number in range(evaluations + 1):  # the last one is the test
        resume = number > 0
        # A resume first does the evaluation in which the run was cut; the next one is its second.
        train_until(config(store, tmp_path / "cut", train__resume=resume, **keys), 0, 0, training=False, turn=1 + resume)
        last = last_of(tmp_path / "cut")
        assert (last["step"], last["evaluated_at"]) == (min(number + 1, evaluations) * 3, number * 3 or -1)
    train(config(store, tmp_path / "cut", train__resume=True, **keys))
    same(tmp_path / "cut", tmp_path / "whole")
    again, _ = evaluate_run(str(tmp_path / "cut"), "valid")
    assert again["ndcg@10"] == whole.valid["ndcg@10"]


def test_a_run_that_is_killed_before_its_best_state_was_kept_keeps_it_when_it_goes_on(store: Path, tmp_path: Path) -> None:
    train_until(config(store, tmp_path / "run"), 1, 0)
    assert last_of(tmp_path / "run")["best_step"] == last_of(tmp_path / "run")["step"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "best")
    train_until(config(store, tmp_path / "run", train__resume=True), 1, 0)
    assert has_checkpoint(tmp_path / "run" / "checkpoints" / "best")


def test_a_refit_that_is_killed_twice_ends_as_if_it_had_not_been(store: Path, tmp_path: Path) -> None:
    keys = {"train__num_epochs": 3, "train__refit": True, "train__save_every": 2}
    run_ranks(lambda: train(config(store, tmp_path / "whole", **keys)), 2)
    for step, resume in ((3, False), (7, True)):
        sections = config(store, tmp_path / "cut", train__resume=resume, **keys)
        assert cut(sections, 2, Reaches(tmp_path / "cut", step, "refit"), victim=int(resume))
    assert last_of(tmp_path / "cut")["phase"] == "refit"
    run_ranks(lambda: train(config(store, tmp_path / "cut", train__resume=True, **keys)), 2)
    same(tmp_path / "cut", tmp_path / "whole")
    with pytest.raises(ValueError, match=r"(?s)config is not the one of the run.*num_epochs 9.*num_epochs 3"):
        train(config(store, tmp_path / "cut", **{**keys, "train__num_epochs": 9, "train__resume": True}))


def test_a_finished_run_says_so_and_keeps_its_result_unless_more_is_asked(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(config(store, tmp_path / "run", optim__schedule="constant"))
    written = (tmp_path / "run" / "result.json").read_bytes()
    again = train(config(store, tmp_path / "run", optim__schedule="constant", train__resume=True))
    assert "this run is finished" in capsys.readouterr().out
    assert (tmp_path / "run" / "result.json").read_bytes() == written
    assert again == first
    longer = train(config(store, tmp_path / "run", optim__schedule="constant", train__resume=True, train__num_epochs=3))
    whole = train(config(store, tmp_path / "whole", optim__schedule="constant", train__num_epochs=3))
    assert longer.losses == whole.losses
    same(tmp_path / "run", tmp_path / "whole")


def test_without_a_checkpoint_a_resume_starts_anew_and_says_so(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_until(config(store, tmp_path / "run"), 0, 2)
    train(config(store, tmp_path / "run", train__resume=True))
    said = capsys.readouterr().out
    assert "no whole checkpoint to resume from" in said
    assert "an earlier run was moved to" in said
    assert not faults_of(tmp_path / "run", NUM_SAMPLES, 2)


def test_tensorboard_shows_each_step_once(store: Path, tmp_path: Path) -> None:
    keys = {"train__tensorboard": True, "train__save_every": 2, "train__refit": True}
    train_until(config(store, tmp_path / "run", **keys), 0, 6)
    train_until(config(store, tmp_path / "run", train__resume=True, **keys), 1, 3)
    result = train(config(store, tmp_path / "run", train__resume=True, **keys))
    for folder, tag, num_steps in (("", "train/loss", result.num_steps), ("refit", "refit/loss", result.refit_steps)):
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / folder)).Reload()
        assert [event.step for event in events.Scalars(tag)] == list(range(1, num_steps + 1))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("budget", ["global_tokens", "max_tokens"])
def test_other_ranks_take_over_every_parameter_and_train_exactly_the_rest(
    store: Path, tmp_path: Path, before: int, after: int, budget: str
) -> None:
    batching = {"batching__global_tokens": 120 if budget == "global_tokens" else None, "batching__max_tokens": 60}
    run = tmp_path / "run"

    def begin() -> Any:
        job = build_job(read_config(config(store, run, train__max_steps=5, train__save_every=5, **batching)), start_world("cpu"))
        run_job(job)
        return full_state(job)

    def take_over() -> Any:
        return full_state(build_job(read_config(config(store, run, **batching)), start_world("cpu")))

    def full_state(job: Any) -> Any:
        optimizer = build_optimizer(job.parallel, job.config.optim, job.config.tables)
        load_checkpoint(run / "checkpoints" / "step-5", job.parallel, optimizer, job.world)
        state = optimizer.state_dict()["state"]
        return full_tables(job.parallel.model), {name: np.asarray(v["exp_avg"]) for name, v in state.items() if "exp_avg" in v}

    wanted, found = run_ranks(begin, before)[0], run_ranks(take_over, after)
    for parameters, moments in found:
        for name, values in wanted[0].items():
            np.testing.assert_array_equal(parameters[name], values, err_msg=name)
        assert moments.keys() == wanted[1].keys()
        for name, values in wanted[1].items():
            np.testing.assert_array_equal(moments[name], values, err_msg=name)
    run_ranks(lambda: train(config(store, run, train__resume=True, **batching)), after)
    assert not faults_of(run, NUM_SAMPLES, 2)
    steps = [step for step, _ in losses_of(run)]
    assert steps == list(range(1, len(steps) + 1))
    if budget == "global_tokens":
        run_ranks(lambda: train(config(store, tmp_path / "whole", **batching)), before)
        assert samples_of(run) == samples_of(tmp_path / "whole")
        # A resume that asked for fewer steps first had a schedule of its own until then.
        assert len(losses_of(run)) == len(losses_of(tmp_path / "whole"))


def test_a_second_change_of_ranks_in_one_epoch_still_trains_every_sample_once(store: Path, tmp_path: Path) -> None:
    batching = {"batching__global_tokens": None, "batching__max_tokens": 40}
    for world_size, max_steps, max_tokens in ((2, 3, 40), (4, 4, 40), (1, 7, 40), (1, 9, 60), (2, 0, 40)):
        keys = {**batching, "batching__max_tokens": max_tokens, "train__max_steps": max_steps, "train__resume": True}
        run_ranks(lambda keys=keys: train(config(store, tmp_path / "run", **keys)), world_size)
    assert not faults_of(tmp_path / "run", NUM_SAMPLES, 2)
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optim__lr": 0.5, "model__dim": 16},
            r"(?s)config is not the one of the run.*model.dim 16, optim.lr 0.5.*model.dim 8, optim.lr 0.01",
        ),
        ({"train__seed": 3}, "train.seed 3"),
        ({"data__max_len": 19}, "data.max_len 19"),
        ({"encoder__dropout": 0.1}, "encoder.dropout 0.1"),
        ({"loss__num_negatives": 3}, "loss.num_negatives 3"),
        ({"tables__replicated_optimizer": "sgd"}, "tables.replicated_optimizer sgd"),
        ({"data__truncate": "stochastic", "data__mean_cost_share": 0.9}, "data.truncate stochastic"),
        ({"train__refit": True}, "train.refit True"),
    ],
)
def test_a_config_that_would_be_another_run_is_refused_with_what_differs(
    store: Path, resumable: Path, changes: dict[str, Any], message: str
) -> None:
    before = sorted((path, path.read_bytes()) for path in resumable.iterdir() if path.is_file())
    with pytest.raises(ValueError, match=message):
        train(config(store, resumable, train__resume=True, **changes))
    assert sorted((path, path.read_bytes()) for path in resumable.iterdir() if path.is_file()) == before


def test_sharding_ranks_and_what_has_no_effect_may_differ_and_the_move_is_said(
    store: Path, resumable: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(resumable, tmp_path / "run")
    keys = {"tables__shard_rows": 1, "tables__per_table": {"item": "table_wise"}, "data__mean_cost_share": 0.5, "train__keep": 5}
    run_ranks(lambda: train(config(store, run, train__resume=True, **keys)), 2)
    said = capfd.readouterr().out
    assert "saved by 1 rank(s), goes on with 2" in said
    assert "table item resharded: row_wise -> table_wise, weights and optimizer state carried over" in said
    assert "table kind resharded: replicated -> row_wise, weights carried over; rowwise_adagrad starts anew" in said
    assert not faults_of(run, NUM_SAMPLES, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_warm_up_goes_on_where_it_was(store: Path, tmp_path: Path, world_size: int) -> None:
    """Ten steps to a rate of 0.1, cut after the sixth: the seventh uses 0.07, and the loss scale is that of the save."""
    keys = {"optim__lr": 0.1, "optim__warmup_steps": 10, "optim__schedule": "constant", "train__save_every": 6}
    keys |= {"train__precision": "fp16", "train__loss_scale": 1024.0}
    run_ranks(lambda: train_until(config(store, tmp_path / "run", **keys), 0, 6), world_size)
    guard = last_of(tmp_path / "run")["guard"]
    assert (guard["scale"], guard["good_steps"], guard["num_updates"]) == (1024.0, 6, 6)
    run_ranks(lambda: train(config(store, tmp_path / "run", train__resume=True, **{**keys, "train__max_steps": 7})), world_size)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert lines[-1]["step"] == 7
    assert lines[-1]["lr"] == pytest.approx(0.07)
    guard = last_of(tmp_path / "run")["guard"]
    assert (guard["scale"], guard["good_steps"], guard["num_updates"]) == (1024.0, 7, 7)


@pytest.fixture(scope="module")
def resumable(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("cut") / "run"
    train_until(config(store, run, train__save_every=2), 0, 5)
    return run


def test_a_changed_store_is_refused_by_every_rank_naming_both_hashes(store: Path, resumable: Path, tmp_path: Path) -> None:
    other = write_histories(tmp_path / "other", NUM_SAMPLES, seed=6)
    hashes = [open_store(path).content_hash for path in (store, other)]

    def attempt() -> str:
        with pytest.raises(ValueError, match="The store is not the one of the run") as caught:
            train(config(other, resumable, train__resume=True))
        return str(caught.value)

    for text in run_ranks(attempt, 2, timeout_s=60):
        assert all(found in text for found in hashes)
    moved = shutil.copytree(store, tmp_path / "moved")
    run = shutil.copytree(resumable, tmp_path / "run")
    result = train(config(moved, run, train__resume=True, train__log_every=3, batching__prefetch=0, train__eval_every=5))
    assert result.num_epochs == 2, "the same store in another place, and what may differ, go on"
