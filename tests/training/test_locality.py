"""Runs on stores from elsewhere and on nodes that each hold only their rows: the same numbers, and nothing read that is not theirs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch.distributed as dist
import yaml

from distrag.batching import nodes
from distrag.checkpoint import turns
from distrag.config import read_config, to_dict
from distrag.data import stage
from distrag.data.content import SAMPLES
from distrag.data.store import Store, open_folder
from distrag.data.write import write_store
from distrag.training.build import build_job
from distrag.training.evaluate_run import evaluate_run
from distrag.training.loop import run_job, train
from distrag.training.plan import plan_run
from distrag.world import World, open_world, start_world
from tests.ranks import run_ranks

NUM_ROWS = 4600


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Many rows of long histories, so that a node's share leaves blocks out; unknown items and weights, so that counts need the columns."""
    random = np.random.default_rng(1)
    lengths = np.sort(random.integers(0, 400, NUM_ROWS))
    size = int(lengths.sum())
    items = np.where(random.random(size) < 0.1, 0, random.integers(1, 41, size))
    return write_store(
        tmp_path_factory.mktemp("locality") / "store",
        history={"item": items, "price": random.random(size).astype(np.float32), "time": np.arange(size)},
        offsets=np.concatenate([[0], lengths.cumsum()]),
        tables={"item": 41},
        features={"time": {"kind": "time"}},
        label=random.integers(0, 2, NUM_ROWS),
        weight=random.integers(1, 4, NUM_ROWS),
        key=random.integers(0, 200, NUM_ROWS),
    )


def config(path: str | Path, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "data": {"path": str(path), "max_len": 6},
        "batching": {"max_tokens": 1024, "locality": "node"},
        "model": {"dim": 8},
        "encoder": {"name": "gru"},
        "loss": {"name": "full_softmax"},
        "optim": {"lr": 0.01},
        "train": {"num_epochs": 2, "log_every": 1, "run_dir": str(run_dir), "device": "cpu", "tensorboard": False},
    }
    return {**base, **{key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}}


def as_nodes(local_size: int) -> World:
    """This rank's world, as if every `local_size` ranks were a machine of their own."""
    world = start_world("cpu")
    return dataclasses.replace(world, local_rank=world.rank % local_size, local_size=local_size)


class Watched:
    """A collate that writes down which rows of the store it opened, and in which epoch."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.opened = collate, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collate, name)

    def __call__(self, view: Any, samples: Any, **named: Any) -> Any:
        if named.get("training", True):
            self.opened.append((named["epoch"], view.rows[samples].tolist()))
        return self.collate(view, samples, **named)


def run_node(store_path: str, folder: Path, local_size: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Trains on this rank of nodes that have a cache each, and tells what happened."""
    world = as_nodes(local_size)
    node = world.rank // local_size
    data = {"path": store_path, "max_len": 6, "cache": str(folder / f"node{node}"), **sections.pop("data", {})}
    job = build_job(read_config(config(store_path, folder / "run", data=data, **sections)), world)
    watched = Watched(job.collate)
    result = run_job(dataclasses.replace(job, collate=watched))
    assert job.place is not None
    return {
        "node": node,
        "opened": watched.opened,
        "held": job.store.held,
        "path": job.store.path,
        "losses": result.losses,
        "valid": result.valid,
        "test": result.test,
        "steps": result.num_steps,
    }


@pytest.fixture(scope="module")
def two_by_two(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "STRIPES", 2)  # of a store this small more would lie in every block
        return run_ranks(run_node, 4, f"file://{store.path}", folder, 2), folder


def test_each_rank_opens_only_rows_of_its_node_and_all_rows_come_once_an_epoch(
    two_by_two: tuple[list[dict[str, Any]], Path], store: Store
) -> None:
    ranks, _ = two_by_two
    trained: dict[int, list[int]] = {0: [], 1: []}
    for rank in ranks:
        rows = np.array([row for _, batch in rank["opened"] for row in batch])
        dataclasses.replace(store, held=rank["held"]).check_held(rows)
        for epoch, batch in rank["opened"]:
            trained[epoch] += batch
    assert [sorted(rows) for rows in trained.values()] == [list(range(NUM_ROWS))] * 2
    assert trained[0] != trained[1]
    assert len({len(rank["opened"]) for rank in ranks}) == 1
    tokens = [np.minimum(store.lengths, 6)[np.concatenate([np.arange(a, b) for a, b in rank["held"]])].sum() for rank in ranks[::2]]
    assert max(tokens) < 1.01 * np.mean(tokens)


def test_a_node_has_only_its_share_on_its_disk(two_by_two: tuple[list[dict[str, Any]], Path], store: Store) -> None:
    ranks, _ = two_by_two
    whole = (store.path / SAMPLES).stat().st_blocks
    for rank in ranks:
        held, path = rank["held"], rank["path"]
        assert (path / SAMPLES).stat().st_blocks < 0.95 * whole
        own = open_folder(path, held)
        for first, end in held:
            a, b = store.offsets[[first, end]]
            np.testing.assert_array_equal(own.position("item")[a:b], store.position("item")[a:b])
            assert own.weight is not None
            assert store.weight is not None
            np.testing.assert_array_equal(own.weight[first:end], store.weight[first:end])


def test_metrics_of_nodes_are_those_of_one_process_that_reads_all(
    two_by_two: tuple[list[dict[str, Any]], Path], store: Store, tmp_path: Path
) -> None:
    ranks, folder = two_by_two
    assert all(rank["valid"] == ranks[0]["valid"] and rank["test"] == ranks[0]["test"] for rank in ranks)
    shutil.copytree(folder / "run", tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    written["batching"]["locality"], written["data"]["cache"] = "global", None
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({**written, "data": {**written["data"], "path": str(store.path)}}))
    for part in ("valid", "test"):
        for run in (folder / "run", tmp_path / "run"):
            alone, _ = evaluate_run(str(run), part)
            assert alone == pytest.approx(ranks[0][part], abs=1e-6)
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["test"] == pytest.approx(ranks[0]["test"])


class Following:
    """A collate that gives one process the rows that all ranks together took in each step, with the counts of its own store."""

    def __init__(self, collate: Any, view: Any, steps: list[tuple[int, list[int]]]) -> None:
        self.collate, self.view, self.steps = collate, view, iter(steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collate, name)

    def __call__(self, view: Any, samples: Any, **named: Any) -> Any:
        if not named.get("training", True):
            return self.collate(view, samples, **named)
        epoch, rows = next(self.steps)
        view, together = self.view.at_epoch(epoch), np.array(rows)
        assert view.rows[together].tolist() == rows
        count = float(self.collate.counts(view)[together].sum())
        tokens = int(view.lengths[together].sum())
        return self.collate(view, together, **{**named, "epoch": epoch, "global_count": count, "num_tokens_global": tokens})


def follow(ranks: list[dict[str, Any]], path: Path, run_dir: Path, **data: Any) -> Any:
    """Trains one process on the steps that ranks took together."""
    together = list(zip(*(rank["opened"] for rank in ranks), strict=True))
    assert all(len({epoch for epoch, _ in of_step}) == 1 for of_step in together)
    steps = [(of_step[0][0], [row for _, rows in of_step for row in rows]) for of_step in together]
    batching = {"locality": "global", "max_tokens": 4096, "prefetch": 0}
    sections = config(path, run_dir, data=data, batching=batching, train={"num_epochs": 0, "max_steps": len(steps)})
    with open_world("cpu") as world:
        job = build_job(read_config(sections), world)
        return run_job(dataclasses.replace(job, collate=Following(job.collate, job.views["train"], steps)))


def test_nodes_train_as_one_process_does_on_the_same_steps(
    two_by_two: tuple[list[dict[str, Any]], Path], store: Store, tmp_path: Path
) -> None:
    ranks, _ = two_by_two
    alone = follow(ranks, store.path, tmp_path / "run")
    assert alone.losses == pytest.approx(ranks[0]["losses"], abs=2e-5)
    assert alone.test["users"] == ranks[0]["test"]["users"]


@pytest.mark.parametrize("truncate", ["random_window", "stochastic"])
def test_windows_that_are_drawn_anew_are_counted_on_their_own_nodes(store: Store, tmp_path: Path, truncate: str) -> None:
    data = {"truncate": truncate, "mean_cost_share": 0.8}

    def attempt() -> dict[str, Any]:
        return run_node(str(store.path), tmp_path / "nodes", 1, data=data)

    ranks = run_ranks(attempt, 2)
    alone = follow(ranks, store.path, tmp_path / "alone", **data)
    assert alone.losses == pytest.approx(ranks[0]["losses"], abs=2e-5)


def test_conversion_on_nodes_gives_the_metrics_of_one_process(store: Store, tmp_path: Path) -> None:
    def attempt() -> dict[str, Any]:
        data = {"split": {"kind": "row", "valid_share": 0.2, "test_share": 0.2}}
        return run_node(str(store.path), tmp_path, 1, data=data, loss={"name": ""}, task="conversion", train={"num_epochs": 1})  # type: ignore[arg-type]

    first, second = run_ranks(attempt, 2)
    assert first["test"] == second["test"]
    for part in ("valid", "test"):
        alone, _ = evaluate_run(str(tmp_path / "run"), part)
        assert alone == pytest.approx(first[part], abs=1e-6)


def test_one_store_from_elsewhere_trains_as_a_folder_does(store: Store, tmp_path: Path) -> None:
    batching = {"locality": "global"}
    here = train(config(store.path, tmp_path / "here", batching=batching, train={"num_epochs": 1}))
    fsspec.filesystem("memory").put(str(store.path), "/locality/store", recursive=True)
    data = {"path": "memory://locality/store", "cache": str(tmp_path / "cache"), "max_len": 6}
    there = train(config("", tmp_path / "there", data=data, batching=batching, train={"num_epochs": 1}))
    assert there.losses == here.losses
    assert there.test == here.test
    told = json.loads((tmp_path / "there" / "result.json").read_text())
    assert told["store_hash"] == store.content_hash
    again, _ = evaluate_run(str(tmp_path / "there"))
    assert again == pytest.approx(there.test, abs=1e-6)


def test_a_plan_of_a_store_elsewhere_fetches_lengths_alone(store: Store, tmp_path: Path) -> None:
    sections = config(f"file://{store.path}", tmp_path / "run", batching={"locality": "global"})
    sections["data"]["cache"] = str(tmp_path / "cache")
    found = plan_run(read_config(sections), 8)
    here = plan_run(read_config(config(store.path, tmp_path / "run", batching={"locality": "global"})), 8)
    for numbers in (found, here):
        numbers["torchrec"].pop("seconds")
    assert found == here
    [folder] = (tmp_path / "cache").iterdir()
    assert (folder / SAMPLES).stat().st_blocks < 0.6 * (store.path / SAMPLES).stat().st_blocks


def test_a_store_that_cannot_be_staged_is_refused_on_every_rank_alike(store: Store, tmp_path: Path) -> None:
    def attempt() -> str:
        world = as_nodes(1)
        data = {"path": f"file://{tmp_path}/nowhere", "cache": str(tmp_path / f"node{world.rank}")}
        with pytest.raises(ValueError, match="A file of the store is missing") as caught:
            build_job(read_config(config("", tmp_path / "run", data=data)), world)
        return str(caught.value)

    first, second = run_ranks(attempt, 2)
    assert first == second


def test_a_cache_that_fails_on_one_node_ends_the_others(store: Store, tmp_path: Path) -> None:
    (tmp_path / "node1").write_text("in the way")

    def attempt() -> str:
        world = as_nodes(1)
        data = {"path": str(store.path), "cache": str(tmp_path / f"node{world.rank}")}
        with pytest.raises(ValueError, match="cache cannot be written") as caught:
            build_job(read_config(config("", tmp_path / "run", data=data)), world)
        return str(caught.value)

    first, second = run_ranks(attempt, 2)
    assert first == f"rank 1: {second}"


def test_a_slow_node_does_not_run_the_others_into_the_time_limit(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_TURN_S", 0.5)

    class Slow(type(fsspec.filesystem("file"))):  # type: ignore[misc]
        protocol = "slow"

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
            time.sleep(0.6 if start is not None and int(os.environ["RANK"]) else 0)
            content: bytes = super().cat_file(path, start=start, end=end, **more)
            return content

    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(stage, "_TURN_BYTES", 1 << 20)

    def attempt() -> tuple[int, float]:
        rank = dist.get_rank()
        dist.destroy_process_group()
        limit = timedelta(seconds=3)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2, timeout=limit)
        world = as_nodes(1)
        started = time.monotonic()
        data = {"path": f"slow://{store.path}", "cache": str(tmp_path / f"node{world.rank}"), "max_len": 6}
        job = build_job(read_config(config("", tmp_path / "run", data=data)), world)
        return job.store.num_samples, time.monotonic() - started

    took = run_ranks(attempt, 2)
    assert [samples for samples, _ in took] == [NUM_ROWS] * 2
    assert min(seconds for _, seconds in took) > 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batching": {"global_tokens": 1024}}, r"(?s)every number of nodes.*global_tokens 1024.*max_tokens"),
        ({"data": {"split": {"kind": "time"}}}, r"(?s)would read every row.*time with locality node.*leave_one_out or row"),
        ({"batching": {"locality": "rack"}}, r"(?s)locality"),
    ],
)
def test_what_nodes_cannot_do_is_refused_with_the_reason(store: Store, tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(config(store.path, tmp_path / "run", **sections))


def test_addresses_stay_as_they_are_in_a_written_config(tmp_path: Path) -> None:
    written = to_dict(read_config({"data": {"path": "s3://bucket/store", "cache": "here"}}))
    assert written["data"]["path"] == "s3://bucket/store"
    assert written["data"]["cache"] == str(Path("here").absolute())
    assert to_dict(read_config({"data": {"path": "store"}}))["data"]["path"] == str(Path("store").absolute())
