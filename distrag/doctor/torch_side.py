"""torch, its GPUs, fbgemm and the exchange between ranks: each asked of a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from distrag.doctor.ask import NoAnswer, ask, ask_together
from distrag.doctor.line import Line

_INSTALL = "make a new environment with ./launch/setup.sh"
_GIB = 2**30


def check_torch() -> tuple[list[Line], int]:
    """Returns what torch says, and how many GPUs it sees."""
    try:
        told = ask("torch")
    except NoAnswer as error:
        return [Line("torch imports", "problem", str(error), _INSTALL)], 0
    builds = f"CUDA {told['cuda']}, NCCL {told['nccl']}" if told["cuda"] else "built without CUDA"
    lines = [Line("torch imports", "ok", f"{builds}; {told['threads']} threads in a lone process")]
    return [*lines, *_gpus(told)], len(told["gpus"])


def _gpus(told: dict[str, Any]) -> list[Line]:
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if not told["gpus"]:
        if told["cuda"] and has_driver:
            return [
                Line(
                    "GPUs", "problem", "a driver, and none that torch can use", "compare `nvidia-smi` with the CUDA version of torch above"
                )
            ]
        if has_driver:
            return [Line("GPUs", "warning", "a driver, but torch was built without CUDA", "install distrag with its extra [cuda]")]
        return [Line("GPUs", "ok", "none; it trains on the CPU")]
    lines = []
    for number, gpu in enumerate(told["gpus"]):
        free, whole = gpu["free_bytes"] / _GIB, gpu["total_bytes"] / _GIB
        text, busy = f"{gpu['name']}, {free:.1f} of {whole:.1f} GiB free", free < whole / 2
        lines.append(Line(f"GPU {number}", "warning" if busy else "ok", text, "`nvidia-smi` shows who holds its memory" if busy else ""))
    if pairs := told["not_peers"]:
        text = f"{len(pairs)} pairs cannot reach each other's memory, such as {tuple(pairs[0])}"
        lines.append(Line("GPU peers", "warning", text, "they exchange through the host, slower; `nvidia-smi topo -p2p r` shows why"))
    return lines


def check_fbgemm(device: str) -> Line:
    """Returns whether a lookup gives the numbers of plain torch, forwards and backwards.

    Args:
        device: `cpu` or `cuda`.
    """
    name = f"fbgemm answers, {device}"
    try:
        told = ask("fbgemm", device)
    except NoAnswer as error:
        return Line(name, "problem", f"a lookup failed: {error}", f"fbgemm does not fit torch: {_INSTALL}")
    if told["error"] > 1e-6 or told["offsets"] != [0, 2, 2, 3]:
        return Line(name, "problem", f"a lookup is wrong: off by {told['error']:g}, offsets {told['offsets']}", _INSTALL)
    return Line(name, "ok", "a lookup and its gradient are those of torch")


def check_exchange(num_gpus: int) -> Line:
    """Returns whether two ranks, or all GPUs, get right sums and rows from each other."""
    size, device = (num_gpus, "cuda") if num_gpus > 1 else (2, "cpu")
    name = f"{size} ranks, {'nccl' if device == 'cuda' else 'gloo'}"
    with tempfile.TemporaryDirectory(prefix="distrag-doctor-") as folder:
        questions = [("exchange", str(rank), str(size), f"{folder}/meeting", device) for rank in range(size)]
        try:
            answers = ask_together(questions, 90.0)
        except NoAnswer as error:
            todo = "look for a firewall on the loopback device; NCCL_DEBUG=INFO and TORCH_CPP_LOG_LEVEL=INFO show what the library tries"
            return Line(name, "problem", f"they cannot exchange: {error}", todo)
    expected = [{"sum": size * (size + 1) / 2, "received": [rank + 10 * other for other in range(size)]} for rank in range(size)]
    if answers != expected:
        return Line(name, "problem", f"wrong numbers: {answers}", _INSTALL)
    return Line(name, "ok", "all-reduce and all-to-all are right")
