"""The metrics of a finished run, computed again from its best checkpoint, on any number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from distrag.checkpoint import load_checkpoint
from distrag.config import read_config
from distrag.problem import problem
from distrag.training.build import build_job
from distrag.training.held_out import Metrics, evaluate_view
from distrag.world import end_world, start_world


def evaluate_run(run_dir: str, part: str = "test", data: str | None = None) -> tuple[Metrics, int]:
    """Returns the metrics of a run's best checkpoint, and this rank's number.

    Args:
        run_dir: folder that `distrag train` wrote.
        part: `valid` or `test`.
        data: another store than the run's own; its vocabularies must be the same.

    Raises:
        ValueError: no run there, or no whole checkpoint.
    """
    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        raise problem(
            "No run in this folder", got="no config.yaml", wanted="a folder that `distrag train` wrote", where=run_dir, todo="mend the path"
        )
    config = read_config(["--config", str(path), *([f"--data.path={data}"] if data else [])])
    world = start_world(config.train.device, timeout_s=config.train.timeout_s)
    try:
        job = build_job(dataclasses.replace(config, debug=False), world)
        load_checkpoint(final_checkpoint(Path(run_dir)), job.parallel)
        return evaluate_view(job, part), world.rank
    finally:
        end_world(world)


def final_checkpoint(run_dir: Path) -> Path:
    """Returns the checkpoint that a run was tested with: of the refit where there was one, else the best."""
    refit = run_dir / "checkpoints" / "refit"
    return refit if refit.exists() else run_dir / "checkpoints" / "best"
