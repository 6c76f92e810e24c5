"""SIGKILL and SIGTERM at random moments: no sample of an epoch is lost or repeated, and on the same ranks not a bit differs.

`python -m tests.training.kills` is the long form of it, under torchrun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.kills import PER_RANK, kill_and_resume


@pytest.mark.parametrize(("worlds", "keys"), [((2, 1, 2), PER_RANK), ((2, 4), {"train__async_save": False}), ((2,), {})])
def test_interruptions_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, worlds: tuple[int, ...], keys: dict[str, Any]) -> None:
    found = kill_and_resume(tmp_path, kills=3, terms=2, worlds=worlds, num_samples=500, seed=3, **keys)
    assert (found["kills"], found["terms"], found["terms_that_saved_their_last_step"]) == (3, 2, 2)
    assert found["changes_of_ranks"] == len(worlds) - 1
    assert found["finished"]
    assert found["steps_logged_once_each"]
    assert found["faults"] == []
    assert found.get("differences", []) == []
