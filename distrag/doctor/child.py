"""What the doctor asks a process of its own: `python -m distrag.doctor.child QUESTION ...` prints the answer as a line of JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ask_torch() -> dict[str, Any]:
    """Returns what torch says of itself and of the GPUs."""
    import torch

    count = torch.cuda.device_count()
    gpus = []
    for number in range(count):
        free, whole = torch.cuda.mem_get_info(number)
        gpus.append({"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": whole})
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    nccl: Any = torch.cuda.nccl.version() if count else None  # type: ignore[no-untyped-call]
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "not_peers": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    }


def ask_fbgemm(device: str) -> dict[str, Any]:
    """Looks three ragged histories up in a table, forwards and backwards, and returns how far the numbers are from plain torch's."""
    import torch
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    where = torch.device(device)
    config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["x"])
    tables = EmbeddingCollection(device=where, tables=[config])
    ids, lengths = torch.tensor([1, 4, 4], device=where), torch.tensor([2, 0, 1], device=where)
    looked_up = tables(KeyedJaggedTensor(["x"], ids, lengths=lengths))["x"]
    weight = tables.embeddings["t"].weight
    looked_up.values().sum().backward()
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    dense = torch.ops.fbgemm.jagged_to_padded_dense(looked_up.values(), [offsets], [2], 0.0)
    expected = torch.bincount(ids, minlength=5)[:, None].expand(5, 4)
    wrong = (looked_up.values() - weight[ids]).abs().max() + (weight.grad - expected).abs().max() + (dense[0] - weight[ids[:2]]).abs().max()
    return {"error": float(wrong), "offsets": offsets.tolist()}


def ask_exchange(rank: str, size: str, meeting: str, device: str) -> dict[str, Any]:
    """Returns what a rank of some gets from an all-reduce and an all-to-all."""
    import torch

    from distrag.world import join_world

    with join_world(int(rank), int(size), Path(meeting), device, timeout_s=60.0) as world:
        total = world.all_reduce_sum(torch.tensor([world.rank + 1.0], device=world.device))
        sent = torch.arange(world.size, device=world.device) + 10 * world.rank
        return {"sum": float(total), "received": world.all_to_all(sent).tolist()}


def ask_config(*words: str) -> dict[str, Any]:
    """Returns what a config asks of its store and its run's folder; reads every byte of the store."""
    from distrag.config import read_config
    from distrag.data.store import open_store
    from distrag.training.plan import plan_run

    config = read_config(words, writes=False)
    store = open_store(config.data.path, verify=True, cache=config.data.cache)
    memory = plan_run(config, 1, planner_s=0)["memory_per_rank"]
    return {
        "samples": store.num_samples,
        "hash": store.schema.content_hash,
        "state_bytes": int(memory["tables_bytes"] + memory["dense_bytes"]),
        "keep": config.train.keep,
        "run_dir": config.train.run_dir,
    }


def ask_folder(run_dir: str, needed: str) -> dict[str, Any]:
    """Writes a file of some bytes where a run will write, takes it away again, and returns the free bytes of that disk.

    Raises:
        ValueError: another run lives there, or a file cannot be written.
    """
    import os

    from distrag.problem import problem
    from distrag.training.loop import check_free

    folder = Path(run_dir)
    check_free(folder)
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(b"\0" * min(int(needed), 2**22))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        todo = "free the disk, or choose another --train.run_dir"
        raise problem("A run cannot write here", got=error.strerror, wanted="room and rights", where=there, todo=todo) from None
    return {"free_bytes": shutil.disk_usage(there).free}


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": ask_torch,
    "fbgemm": ask_fbgemm,
    "exchange": ask_exchange,
    "config": ask_config,
    "folder": ask_folder,
}


def main() -> None:
    """Answers one question."""
    answer = QUESTIONS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
