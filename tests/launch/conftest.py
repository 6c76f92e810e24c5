"""A real Slurm for the tests marked `slurm`, started once; a store and a config for jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import Site, Slurm, start_slurm, write_site


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes, partitions `low` (pre-empted) and `high`; skips, with the reason, where none can be had."""
    with start_slurm(tmp_path_factory.mktemp("slurm") / "state") as cluster:
        yield cluster


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A folder to submit from."""
    return write_site(tmp_path)
