"""Where the first bad number of a step stood: input, looked-up vectors, layer, loss or gradient, and of which samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distrag.batch import RaggedBatch, save_batch
from distrag.model import SequenceModel
from distrag.parallel import Parallel
from distrag.training.step import run_parts, shared_key
from distrag.world import World, agreed

FOLDER = "bad_steps"
MOST_REPORTS = 20
"""Skipped steps of a run that are looked into and written down; later ones are only counted."""
_MOST_SAMPLES = 10


@dataclass(frozen=True)
class Finding:
    """The first bad number on one rank.

    Attributes:
        kind: `parameter`, `input`, `vectors` (of a feature), `forward` or `backward` (of a layer), `loss`, or `sum` where every rank's own
            gradients are finite and only their sum over the ranks is not.
        name: parameter, field, feature or layer.
        value: the number.
        samples: sample numbers in the train view that have such numbers there, at most 10; empty where it belongs to no sample.
    """

    kind: str
    name: str
    value: float
    samples: list[int]

    def __str__(self) -> str:
        of = f" of sample(s) {', '.join(map(str, self.samples))}" if self.samples else ""
        shown = {"vectors": "looked-up vectors of", "forward": "output of", "backward": "gradient at"}.get(self.kind, self.kind)
        return f"{shown} {self.name}{of} ({self.value})"


@dataclass(frozen=True)
class Report:
    """What was bad in a step.

    Attributes:
        text: the first findings, in a line.
        is_lasting: a parameter itself is bad, so that no later step can be better.
    """

    text: str
    is_lasting: bool


def find_bad(parallel: Parallel, batch: RaggedBatch, factor: float, micro_batches: int = 1) -> Finding | None:
    """Returns the first bad number of this rank's share, from running it once more; nothing is updated. A collective.

    Args:
        parallel: the sharded model.
        batch: this rank's share of the step.
        factor: what its loss is multiplied by.
        micro_batches: as in the step.
    """
    found: list[Finding] = []
    found += _in_parameters(parallel)
    found += _in_inputs(batch)
    boundary = parallel.plain.tables.boundary
    boundary.now.holds = True
    for parameter in parallel.dense.values():
        parameter.grad = None
    with _watched(parallel.plain, found):
        run_parts(parallel, batch, factor, None, micro_batches)
    for key, (_, leaf) in boundary.now.held.items():
        if leaf.grad is not None:
            found += _in_key("backward", f"the vectors of {key!r}", leaf.grad, batch, key, shared_key(parallel.plain))
    boundary.drop()
    for name, parameter in parallel.dense.items():
        if parameter.grad is not None and not found:
            found += _in("sum", f"the gradient of {name}", parameter.grad, None)
        parameter.grad = None
    return found[0] if found else None


def _in(kind: str, name: str, values: Tensor, rows: Tensor | None) -> list[Finding]:
    """Returns a finding where a tensor holds a bad number; `rows` names the sample of each of its rows."""
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return []
    at = bad.nonzero()[0]
    samples: list[int] = []
    if rows is not None and values.ndim and len(rows) == len(values):
        samples = torch.unique(rows[bad.view(len(values), -1).any(1)])[:_MOST_SAMPLES].tolist()
    return [Finding(kind, name, float(values[tuple(at)]), [sample for sample in samples if sample >= 0])]


def _in_parameters(parallel: Parallel) -> list[Finding]:
    return [finding for name, value in parallel.dense.items() for finding in _in("parameter", name, value.detach(), None)]


def _in_inputs(batch: RaggedBatch) -> list[Finding]:
    of_position = batch.samples.repeat_interleave(batch.lengths)
    fields = {"numbers": of_position, "context": batch.samples, "labels": batch.samples, "weights": batch.samples}
    return [finding for name, rows in fields.items() for finding in _in("input", name, getattr(batch, name), rows)]


def _in_key(kind: str, name: str, values: Tensor, batch: RaggedBatch, key: str, shared: str) -> list[Finding]:
    rows = None if key == shared else batch.samples.repeat_interleave(batch.ids[key].lengths())  # shared ones are of no sample
    return _in(kind, name, values, rows)


@contextmanager
def _watched(model: SequenceModel, found: list[Finding]) -> Iterator[None]:
    """Adds to `found` what the layers of a model give forward and get backward, in the order in which it happens."""
    current: list[RaggedBatch] = []

    def rows_of(values: Tensor) -> Tensor | None:
        batch = current[-1]
        if batch.num_tokens == batch.num_samples:
            return None  # the shape does not tell positions from samples
        if values.ndim and len(values) == batch.num_tokens:
            return batch.samples.repeat_interleave(batch.lengths)
        return batch.samples if values.ndim and len(values) == batch.num_samples else None

    def forward(name: str, output: Any) -> None:
        if isinstance(output, dict):  # the tables
            for key, values in output.items():
                found.extend(_in_key("vectors", repr(key), values.detach(), current[-1], key, shared_key(model)))
        elif isinstance(output, Tensor):
            found.extend(_in("forward", name, output.detach(), rows_of(output)))
            if output.requires_grad:
                rows = rows_of(output)
                output.register_hook(lambda grad: found.extend(_in("backward", name, grad, rows)))  # type: ignore[no-untyped-call]
        elif isinstance(output, tuple) and name == "loss" and isinstance(output[0], Tensor):
            found.extend(_in("loss", "its sum", output[0].detach(), None))

    with ExitStack() as hooks:
        handle = model.register_forward_pre_hook(lambda module, given: current.append(given[0]))
        hooks.callback(handle.remove)
        for name, module in model.named_modules():
            if name and (name == "tables" or not name.startswith("tables.")):
                hook = module.register_forward_hook(lambda module, given, output, name=name: forward(name, output))
                hooks.callback(hook.remove)
        yield


def report_bad_step(
    parallel: Parallel, batch: RaggedBatch, factor: float, micro_batches: int, world: World, run_dir: Path, step: int
) -> Report:
    """Finds out what was bad in a step, writes it and the batch into the run directory, and returns it. A collective.

    `bad_steps/step-<n>.json` holds the findings of all ranks; `bad_steps/step-<n>-rank-<r>.pt` the batch of each rank that has one, or of
    all where none has. `distrag.batch.load_batch` reads it.

    Args:
        parallel: the sharded model.
        batch: this rank's share of the step.
        factor: what its loss was multiplied by.
        micro_batches: as in the step.
        world: the ranks.
        run_dir: folder of the run.
        step: number of the global step, from 1.
    """
    own = find_bad(parallel, batch, factor, micro_batches)
    everyone: list[Finding | None] = world.all_gather_object(own)
    bad = [(rank, finding) for rank, finding in enumerate(everyone) if finding is not None]
    # A sum over the ranks is bad on all of them; what one of them did is the cause.
    causes = [(rank, finding) for rank, finding in bad if finding.kind != "sum"] or bad
    folder = run_dir / FOLDER

    def write() -> None:
        if not causes or world.rank in [rank for rank, _ in causes]:
            folder.mkdir(exist_ok=True)
            save_batch(batch, folder / f"step-{step:06d}-rank-{world.rank}.pt")
        if world.rank == 0:
            folder.mkdir(exist_ok=True)
            lines = {"step": step, "epoch": batch.epoch, "findings": [{"rank": rank, **asdict(finding)} for rank, finding in causes]}
            (folder / f"step-{step:06d}.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")

    agreed(world, write)
    if not causes:
        return Report("a number that is finite when the step is run once more", is_lasting=False)
    text = "; ".join(f"rank {rank}: {finding}" for rank, finding in causes[:3])
    return Report(text, is_lasting=any(finding.kind == "parameter" for _, finding in causes))
