"""Signal 9 at random moments, on changing numbers of ranks: no sample of an epoch is lost or repeated.

`python -m tests.training.kills` is the long form of it, under torchrun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.kills import PER_RANK, kill_and_resume


@pytest.mark.parametrize(("worlds", "keys"), [((2, 1, 2), PER_RANK), ((2, 4), {"train__async_save": False})])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, worlds: tuple[int, ...], keys: dict[str, Any]) -> None:
    found = kill_and_resume(tmp_path, kills=4, worlds=worlds, num_samples=900, seed=3, **keys)
    assert found["kills"] == 4
    assert found["changes_of_ranks"] == len(worlds) - 1
    assert found["finished"]
    assert found["steps_logged_once_each"]
    assert found["faults"] == []
