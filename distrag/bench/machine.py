"""What the numbers of a bench were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchrec", "numba", "numpy")


def describe_machine(threads: int) -> dict[str, Any]:
    """Returns the processor, Python and the versions of what computes.

    Args:
        threads: threads of torch.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": model, "torch_threads": threads, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def machine_line(machine: dict[str, Any]) -> str:
    """Returns `describe_machine` in one line."""
    words = [str(machine["cpu"]), f"{machine['torch_threads']} thread(s)"]
    return ", ".join(words + [f"{name} {machine[name]}" for name in machine if name not in ("cpu", "torch_threads")])
