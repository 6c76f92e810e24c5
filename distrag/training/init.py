"""The weights that a new run starts from: those of another run, if every table row and every parameter means the same here."""

from __future__ import annotations

from pathlib import Path

from distrag.checkpoint import Found, find_checkpoint, find_newest, has_checkpoint, load_checkpoint, match_checkpoint
from distrag.problem import problem
from distrag.training.build import Job
from distrag.training.contract import check_contract, pin_features, read_schema
from distrag.training.evaluate_run import find_part
from distrag.training.resume import checkpoints_of
from distrag.world import agreed

_TODO = "give a run of these shapes to --train.init, or leave it out"


def find_init(job: Job) -> Found | None:
    """Returns the checkpoint that `train.init` names, None where it names none. A collective: every rank calls it.

    Of a run it is the one that was tested: the refit where there was one, else the best; before its first evaluation the newest.

    Raises:
        ValueError: no whole checkpoint there, one of another store's vocabularies, or one that does not fit, with the list of what
            differs; the same on every rank, before anything changes.
    """
    if not job.config.train.init:
        return None
    world = job.world
    path: Path = world.broadcast_object(world.on_first(lambda: _resolve(job)))
    found = find_newest(path, world) if path.name == "checkpoints" else find_checkpoint(path, world)
    if found is None:
        todo = "wait for its first save, or give another run"
        raise problem("The run has no checkpoint to start from", got="none", wanted="a whole checkpoint", where=path, todo=todo)
    agreed(world, lambda: _check_store(job, found))
    match_checkpoint(found, job.parallel, None, world, _TODO)
    return found


def _resolve(job: Job) -> Path:
    path, run_dir = Path(job.config.train.init), Path(job.config.train.run_dir)
    if path.resolve().is_relative_to(run_dir.resolve()):
        todo = "set another --train.run_dir; to go on with a run, use --resume"
        raise problem("A run cannot start from itself", got=path, wanted=f"a run outside {run_dir}", where="train.init", todo=todo)
    if not path.is_dir():
        got, wanted = f"no folder {path}", "a run or one of its checkpoints"
        raise problem("No run to start from", got=got, wanted=wanted, where="train.init", todo="mend the path")
    if not checkpoints_of(path).is_dir():
        return path
    tested = find_part(path, "test")
    return tested if has_checkpoint(tested) else checkpoints_of(path)


def _check_store(job: Job, found: Found) -> None:
    schema = read_schema(found.path)
    todo = "prepare the store with the vocabularies of that run, or leave out --train.init"
    check_contract(pin_features(job.config, schema), job.store, found.path, todo)


def start_from(job: Job, found: Found) -> str:
    """Loads the weights; returns what to say of it. A collective: every rank calls it."""
    load_checkpoint(found, job.parallel, None, job.world)
    return f"starts from the weights of {found.path} (step {found.state.get('step')})"
