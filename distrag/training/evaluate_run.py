"""The metrics of a finished run, computed again from its checkpoint, on any number of ranks and any store with the same meaning."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from distrag.checkpoint import has_checkpoint, load_checkpoint
from distrag.config import RunConfig, check_ks, read_config
from distrag.problem import problem
from distrag.training.build import build_job
from distrag.training.contract import check_contract, pin_features, pin_windows, read_schema
from distrag.training.held_out import Metrics, evaluate_view
from distrag.training.locality import open_run_store
from distrag.world import agreed, open_world


def evaluate_run(run_dir: str, part: str = "test", data: str | None = None, ks: Sequence[int] | None = None) -> tuple[Metrics, int]:
    """Returns the metrics of a run's checkpoint, and this rank's number.

    Args:
        run_dir: folder that `distrag train` wrote.
        part: `valid`, scored by the best checkpoint, or `test`, scored by the refit where there was one.
        data: another store than the run's own; features and vocabularies must mean the same.
        ks: cut-offs of the ranking metrics; otherwise the run's own.

    Raises:
        ValueError: no run there, no whole checkpoint, another store's vocabularies, or cut-offs where nothing is ranked.
    """
    folder = Path(run_dir)
    config = _read(folder, data, ks)
    with open_world(config.train.device, timeout_s=config.train.timeout_s) as world:
        store, _ = open_run_store(config, world)
        agreed(world, lambda: check_contract(config, store, folder))
        job = build_job(config, world)
        path = world.broadcast_object(world.on_first(lambda: find_part(folder, part)))
        load_checkpoint(path, job.parallel, None, world)
        return evaluate_view(job, part), world.rank


def _read(folder: Path, data: str | None, ks: Sequence[int] | None) -> RunConfig:
    path = folder / "config.yaml"
    if not os.path.lexists(path):
        raise problem(
            "No run in this folder", got="no config.yaml", wanted="a folder that `distrag train` wrote", where=folder, todo="mend the path"
        )
    config = read_config(["--config", str(path), *([f"--data.path={data}"] if data else [])], writes=False)
    config = pin_windows(pin_features(dataclasses.replace(config, debug=False), read_schema(folder)))
    if ks is None:
        return config
    if config.task != "next_item":
        got = f"--ks with {config.task}"
        raise problem("Cut-offs where nothing is ranked", got=got, wanted="no --ks", where="--ks", todo="leave it out")
    check_ks(ks, "--ks")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, eval_ks=tuple(ks)))


def find_part(run_dir: Path, part: str) -> Path:
    """Returns the checkpoint that scores `part`: the best for valid (a refit has trained on it); for test the refit where there was one."""
    refit = run_dir / "checkpoints" / "refit"
    return refit if part == "test" and has_checkpoint(refit) else run_dir / "checkpoints" / "best"
