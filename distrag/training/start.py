"""Where a run starts: at its newest whole checkpoint, from the weights of another run, or at nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distrag.checkpoint import Found
from distrag.training.build import Job
from distrag.training.init import find_init
from distrag.training.resume import check_state, check_tensors, find_state
from distrag.world import agreed


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        found: the checkpoint that it goes on from; None for a new run.
        state: the run's values in it.
        init: what a new run, and its refit, takes its weights from.
        notes: what there is to say.
    """

    found: Found | None
    state: dict[str, Any] | None
    init: Found | None
    notes: list[str] = field(default_factory=list)


def find_start(job: Job, folder: Path, *, resumes: bool) -> Start:
    """Returns where the run in this folder starts; says so where it is to resume and has saved nothing. A collective.

    Args:
        job: the run.
        folder: its folder.
        resumes: whether it is to go on from what it saved there.

    Raises:
        ValueError: a checkpoint of the run, or the one that `train.init` names, is damaged, belongs to another store or config, or does
            not fit; the same on every rank, before anything changes.
    """
    found, state, notes = None, None, []
    if resumes:
        found, state = find_state(job, folder)
        if found is None or state is None:
            job.world.on_first(lambda: print(f"{folder}: no whole checkpoint to resume from; the run starts at its first step", flush=True))
        else:
            agreed(job.world, lambda: check_state(state, job))
            notes = check_tensors(found, state, job)
    begins = state is None or (job.config.train.refit and state["phase"] == "train")
    return Start(found, state, find_init(job) if begins else None, notes)
