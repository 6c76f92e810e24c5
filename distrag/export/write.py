"""One safetensors file of a run: whole tables and the dense part, written tensor by tensor from a checkpoint of any number of ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from distrag.checkpoint import Found, find_checkpoint, find_newest
from distrag.checkpoint.manifest import Damage
from distrag.checkpoint.tensors import dtypes_of, read_metadata, read_whole, sizes_of
from distrag.problem import problem
from distrag.training.contract import SCHEMA, VOCABULARIES
from distrag.training.evaluate_run import find_part
from distrag.training.resume import checkpoints_of
from distrag.world import World

FORMAT = "distrag-model-1"
CHECKPOINTS = ("best", "last", "refit")
_ALONE = World(0, 1, 0, 1, torch.device("cpu"), started_here=False)
_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
_DTYPES = {torch.float32: "F32", **_INTEGERS}


def export_run(run_dir: str | Path, out: str | Path, checkpoint: str = "") -> dict[str, Any]:
    """Writes the weights of a run as one file, fp32, and returns what was written.

    It holds one tensor in memory at a time. The file's metadata has all that `load_model` needs: config, schema, vocabulary hashes.

    Args:
        run_dir: folder that `distrag train` wrote.
        out: the file, whole or not there; a former one is replaced.
        checkpoint: `best`, `last` (the newest save) or `refit`; otherwise what was tested: the refit where there was one, else the best.

    Raises:
        ValueError: no such whole checkpoint, or a file that cannot be written.
    """
    found = _find(Path(run_dir), checkpoint)
    try:
        metadata = read_metadata(found.path, found.manifest.files)
    except Damage as damage:
        todo = "take another checkpoint of the run with --checkpoint"
        raise problem("A checkpoint cannot be read", got=damage, wanted="as it was saved", where=found.path, todo=todo) from None
    sizes = {name: size for name, size in sizes_of(metadata).items() if name.startswith("model.")}
    kinds = {name: _plain(name, dtype) for name, dtype in dtypes_of(metadata).items() if name in sizes}
    about = _about(found)
    header, total = _header(sizes, kinds, about)
    path, part = Path(out), Path(f"{out}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(header)
            for name in sizes:
                read_whole(found.path, metadata, name).to(kinds[name]).numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        where = error.filename or path
        todo = "free or unlock the path, or give another --out"
        raise problem("The export cannot be written", got=error.strerror, wanted="a writable place", where=where, todo=todo) from None
    parameters, size = sum(math.prod(shape) for shape in sizes.values()), len(header) + total
    return {"file": str(path), "checkpoint": str(found.path), "step": found.state.get("step"), "parameters": parameters, "bytes": size}


def _find(run_dir: Path, checkpoint: str) -> Found:
    folder = checkpoints_of(run_dir)
    if checkpoint not in ("", *CHECKPOINTS):
        raise problem("No such checkpoint", got=checkpoint, wanted=CHECKPOINTS, where="--checkpoint", todo="choose one of these")
    if checkpoint == "last":
        found = find_newest(folder, _ALONE)
        if found is None:
            todo = "train the run to its first save, or mend the path"
            raise problem("No whole checkpoint", got="none", wanted="a save of the run", where=folder, todo=todo)
        return found
    return find_checkpoint(folder / checkpoint if checkpoint else find_part(run_dir, "test"), _ALONE)


def _plain(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float32
    if dtype not in _DTYPES:
        todo = "keep it as real numbers, or out of the module's state_dict"
        raise problem("A tensor that the file cannot hold", got=dtype, wanted="real numbers or integers", where=name, todo=todo)
    return dtype


def _about(found: Found) -> dict[str, str]:
    """Returns the metadata of the file, texts by name."""
    missing = [name for name in ("config.yaml", SCHEMA, VOCABULARIES) if not (found.path / name).is_file()]
    if missing:
        todo = "export a checkpoint that `distrag train` saved"
        raise problem("A checkpoint without its meaning", got=f"no {missing[0]}", wanted="config and schema", where=found.path, todo=todo)
    config = yaml.safe_load((found.path / "config.yaml").read_text(encoding="utf-8"))
    return {
        "format": FORMAT,
        "config": json.dumps(config),
        "schema": (found.path / SCHEMA).read_text(encoding="utf-8"),
        "vocabularies": (found.path / VOCABULARIES).read_text(encoding="utf-8"),
        "store_hash": str(found.state.get("store_hash", "")),
        "step": str(found.state.get("step", "")),
        "checkpoint": found.path.name,
    }


def _header(sizes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, torch.dtype], about: dict[str, str]) -> tuple[bytes, int]:
    """Returns the head of a safetensors file, and how many bytes of tensors follow it."""
    entries: dict[str, Any] = {"__metadata__": about}
    at = 0
    for name, size in sizes.items():
        end = at + math.prod(size) * kinds[name].itemsize
        entries[name.removeprefix("model.")] = {"dtype": _DTYPES[kinds[name]], "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, at
