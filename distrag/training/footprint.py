"""What a rank is expected to hold in memory: tables, dense parameters, what a step keeps for its backward, batches."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec import KeyedJaggedTensor

from distrag.batch import RaggedBatch
from distrag.config import RunConfig
from distrag.embedding.config import TableSpec
from distrag.embedding.plan import Placement
from distrag.embedding.tables import Tables
from distrag.model import SequenceModel
from distrag.ragged import lengths_to_offsets
from distrag.training.checks import Checked
from distrag.training.composition import spread
from distrag.training.nnls import solve_nonnegative
from distrag.training.trial import take_samples

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

DENSE_BYTES = 16
"""Of a dense parameter: float32 weight, gradient, and the two moments of Adam or AdamW."""
_PROBE_TOKENS = 512
_PROBE_SECONDS = 0.25  # a step of this long is not made larger
_PROBE_ROWS, _PROBE_SAMPLES = 1024, 1_000_000
_PROBE_BYTES = 1 << 26


@dataclass(frozen=True)
class StepBytes:
    """What a step needs beside parameters and tables, as `per_token * tokens + per_sample * samples + fixed`, in bytes.

    Attributes:
        activations: the three numbers of the largest sum of tensors that are alive at once in forward and backward.
        batch: the three numbers of one batch.
        num_dense: parameters outside of tables.
    """

    activations: tuple[float, float, float]
    batch: tuple[float, float, float]
    num_dense: int


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations make, for as long as they live, and the most at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in inputs:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


def measure_peak(run: Callable[[], None]) -> int:
    """Returns the bytes of the tensors that `run` makes, the most that live at once; what single operations need inside is not seen."""
    with _Ledger() as ledger:
        run()
    return int(ledger.most)


def measure_step(config: RunConfig, checked: Checked, lengths: Ints, most_tokens: int) -> StepBytes:
    """Returns what a step needs in memory, measured on this machine's CPU with a few batches of these lengths.

    The plain model runs forward and backward, with its tables cut to a few rows and ids drawn at random: a batch looks up as many vectors
    whatever they are. Three compositions (long histories, twice as many, short ones) tell tokens, samples and the constant apart. They hold
    512 tokens, or up to `most_tokens` as long as a step stays below 0.25 s. On CUDA the kernels are others: there it is an estimate of the
    same order.

    Args:
        config: the run.
        checked: its choices.
        lengths: of the samples, `[N]`.
        most_tokens: tokens of the fullest rank.
    """
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of torch's own question whether it traces
    probe = _build_probe(config, checked)
    some = spread(len(lengths), _PROBE_SAMPLES)
    order = some[np.argsort(lengths[some], kind="stable")]
    filled = order[lengths[order] > 0]
    parts, peaks, sizes = [], [], []

    def weigh(samples: Ints) -> float:
        batch = probe.batch(lengths[samples])
        started = time.perf_counter()
        peaks.append(measure_peak(lambda: probe.run(batch)))
        sizes.append(batch_bytes(batch))
        parts.append((float(lengths[samples].sum()), float(len(samples)), 1.0))
        return time.perf_counter() - started

    tokens = max(_PROBE_TOKENS, int(lengths.max(initial=0)))
    weigh(take_samples(lengths, filled[::-1], tokens, tokens))  # kernels may compile
    while weigh(take_samples(lengths, filled[::-1], tokens, tokens)) < _PROBE_SECONDS and 4 * tokens <= most_tokens:
        tokens *= 4
    weigh(take_samples(lengths, filled[::-1], 2 * tokens, 2 * tokens))
    weigh(take_samples(lengths, filled, tokens, tokens // 2))
    parts, peaks, sizes = parts[-3:], peaks[-3:], sizes[-3:]
    dense = sum(p.numel() for name, p in probe.model.named_parameters() if not name.startswith("tables."))
    activations, batches = (tuple(solve_nonnegative(np.array(parts), np.array(values, float)).tolist()) for values in (peaks, sizes))
    return StepBytes(activations, batches, dense)


@dataclass(frozen=True)
class _Probe:
    """The plain model on the CPU with cut tables.

    Attributes:
        model: in training mode, its gradients made.
        checked: the choices of the run.
        rows: rows of the table behind each key, in the order of the batch.
    """

    model: SequenceModel
    checked: Checked
    rows: dict[str, int]

    def run(self, batch: RaggedBatch) -> None:
        """Runs forward and backward."""
        self.model.zero_grad(set_to_none=False)  # gradients are counted with the parameters
        self.model(batch)[0].backward()

    def batch(self, sizes: Ints) -> RaggedBatch:
        """Returns a batch of histories of these lengths with ids at random; a dummy where there are none."""
        inputs, lengths = self.checked.inputs, torch.from_numpy(sizes if len(sizes) else np.zeros(1, np.int64))
        B, P = len(lengths), int(lengths.sum())
        per_key = torch.stack([self._lengths(key, lengths) for key in self.rows])
        counts = per_key.sum(1).tolist()
        values = [torch.randint(rows, (count,)) for rows, count in zip(self.rows.values(), counts, strict=True)]
        ids = KeyedJaggedTensor(list(self.rows), torch.cat(values), lengths=per_key.flatten(), stride=B, length_per_key=counts)
        numbers, context = torch.zeros(P, inputs.num_numbers), torch.zeros(B, inputs.num_context)
        return RaggedBatch(ids, lengths_to_offsets(lengths), numbers, context, torch.zeros(B), torch.ones(B), torch.arange(B))

    def _lengths(self, key: str, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the ids of each sample for a key, as `Collate` gives them in training."""
        inputs, loss = self.checked.inputs, self.checked.loss
        if key in inputs.history_keys:
            return lengths
        if not key.endswith(":negative"):
            return torch.ones_like(lengths)
        if loss.negatives == "per_position":
            return lengths * int(loss.num_negatives)
        drawn = torch.zeros_like(lengths)
        drawn[0] = loss.num_negatives
        return drawn


def _build_probe(config: RunConfig, checked: Checked) -> _Probe:
    dim, target = config.model.dim, checked.inputs.target_table
    whole = checked.loss.needs_table and checked.inputs.num_items * dim * 4 <= _PROBE_BYTES
    specs = [TableSpec(s.name, s.num_rows if whole and s.name == target else min(s.num_rows, _PROBE_ROWS), s.keys) for s in checked.specs]
    tables = Tables(specs, checked.shardings, dim, init_std=0.02, seed=0)
    autocast = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.precision]
    model = SequenceModel(config.model, checked.inputs, tables, checked.build_encoder(), checked.loss, autocast=autocast)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = {key: spec.num_rows for spec in specs for key in spec.keys}
    return _Probe(model.train(), checked, {key: rows[key] for key in tables.key_order})


def batch_bytes(batch: RaggedBatch) -> int:
    """Returns the bytes of all tensors of a batch."""
    tensors = [
        batch.ids.values(),
        batch.ids.lengths(),
        batch.offsets,
        batch.numbers,
        batch.context,
        batch.labels,
        batch.weights,
        batch.samples,
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def table_bytes(placements: list[Placement], world_size: int) -> Floats:
    """Returns the bytes of tables, optimizer state and dense gradients of each rank, float64 `[W]`."""
    load = np.zeros(world_size)
    for placement in placements:
        load[list(placement.ranks)] += placement.bytes_per_rank
    return load


def expect_memory(
    step: StepBytes,
    placements: list[Placement],
    tokens: Ints,
    samples: Ints,
    sharded_ids: float,
    dim: int,
    prefetch: int,
    micro_batches: int = 1,
) -> dict[str, float]:
    """Returns the expected memory of the fullest rank, in bytes by kind.

    - `tables_bytes`: the rank that holds most: weights, optimizer state, and the dense gradient of replicated tables.
    - `dense_bytes`: 16 bytes a parameter: weight, gradient, two moments.
    - `activation_bytes`: the largest `per_token * tokens + per_sample * samples + fixed` of any rank in any step, from `measure_step`, and
      the gradient of the largest replicated table on its way to where it is summed. With micro-batches the largest of one of them, and the
      vectors of sharded tables with their gradients for the whole share.
    - `exchange_bytes`: vectors of sharded tables that are looked up for other ranks and sent: one more copy of `ids * D * 4`, forward,
      and one of their gradients, backward; none on one rank.
    - `batch_bytes`: the batch of that rank and those built ahead.

    The interpreter, its libraries, the CUDA context and the mapped pages of the store come on top.

    Args:
        step: from `measure_step`.
        placements: from `build_placements`.
        tokens: of each rank in each step that was looked at, `[S, W]`.
        samples: the same for samples.
        sharded_ids: ids of a rank and step in sharded tables, a mean.
        dim: width of every table.
        prefetch: batches built ahead.
        micro_batches: parts that a rank's share is run in.
    """
    world_size = tokens.shape[1]
    a, b = step.activations, step.batch
    widest = max((p.num_rows - _PROBE_ROWS for p in placements if p.sharding == "replicated"), default=0)
    a = (a[0], a[1], a[2] + max(0, widest) * dim * 4)
    held = 2 * sharded_ids * dim * 4 * (micro_batches > 1)
    numbers = {
        "tables_bytes": float(table_bytes(placements, world_size).max()),
        "dense_bytes": float(step.num_dense * DENSE_BYTES),
        "activation_bytes": float((a[0] * tokens + a[1] * samples).max(initial=0.0) / micro_batches + a[2]) + held,
        "exchange_bytes": 2 * sharded_ids * dim * 4 * (world_size > 1),
        "batch_bytes": float((b[0] * tokens + b[1] * samples).max(initial=0.0) + b[2]) * (prefetch + 1),
    }
    return {**numbers, "total_bytes": sum(numbers.values()), "activation_bytes_per_token": a[0], "activation_bytes_per_sample": a[1]}
