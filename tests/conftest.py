"""What every test may rely on: one torch thread, the shared data or a skip that says so, a GPU or a skip that says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)  # tests are small, machines are shared, and sums come out in one order
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA in a process that forks ranks
# The same examples on every machine, and no deadline: a first call may compile, and the machine may be busy.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
# Of `python -m tests.batching.mutate`, which asks whether a test fails and not how simply.
settings.register_profile("few", parent=settings.get_profile("steady"), max_examples=5, phases=[Phase.explicit, Phase.generate])
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(autouse=True)
def usual_process() -> Iterator[None]:
    """Undoes what a world that a test has started, and not ended, leaves to its process."""
    had_one = dist.is_initialized()  # a module's own
    yield
    if dist.is_initialized() and not had_one:
        dist.destroy_process_group()
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the repository; tests that ask for it skip where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data sets in {folder}")
    return folder
