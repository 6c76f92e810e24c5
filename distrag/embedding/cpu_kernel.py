"""FBGEMM's CPU table kernel, replaced by a faster one with the same arithmetic.

FBGEMM's CPU backward costs about 0.8 us a looked-up row; sorting the ids once, updating each touched row once, with vectors and with
the rows of the next ids already on their way from memory, costs a twentieth of that. The kernel works on FBGEMM's own weight and state
memory, so sharding, checkpoints and learning rates stay the library's. CUDA tables keep FBGEMM's kernel; tests hold the two equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import nn

from distrag.problem import problem

SGD, ADAGRAD, ROWWISE_ADAGRAD = 0, 1, 2
_AHEAD = 16  # rows between asking memory for one and using it: about the time a row takes to arrive
_REASSOCIATE = {"contract", "reassoc", "nsz"}  # sums over a row in vectors; in another order than written, but always the same one


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, array: Any, i: Any) -> Any:
    """Asks memory for row `i` of a matrix; changes nothing."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        stride, byte = cgutils.unpack_tuple(builder, made.strides, 2)[0], ir.IntType(8)
        row = builder.gep(builder.bitcast(made.data, byte.as_pointer()), [builder.mul(args[1], stride)])
        flag = ir.IntType(32)
        call = builder.module.declare_intrinsic("llvm.prefetch", [row.type], ir.FunctionType(ir.VoidType(), [row.type, flag, flag, flag]))
        for line in range(4):  # 256 bytes; the processor follows a longer row by itself
            builder.call(call, [builder.gep(row, [ir.Constant(ir.IntType(64), 64 * line)]), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _flat_rows(indices: Any, offsets: Any, num_samples: int, row_base: Any, num_rows: Any, out: Any) -> int:
    """Writes the row of each id in the concatenated tables; returns the first bad position, or -1."""
    for feature in range(row_base.shape[0]):
        for i in range(offsets[feature * num_samples], offsets[(feature + 1) * num_samples]):
            if indices[i] < 0 or indices[i] >= num_rows[feature]:
                return int(i)
            out[i] = indices[i] + row_base[feature]
    return -1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _take(weights: Any, rows: Any, out: Any) -> None:
    """Writes the rows of a matrix one after the other into `out`."""
    for i in range(out.shape[0]):
        if i + _AHEAD < out.shape[0]:
            _prefetch(weights, rows[i + _AHEAD])
        row = weights[rows[i]]
        for d in range(out.shape[1]):
            out[i, d] = row[d]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pack(rows: Any, out: Any) -> None:
    """Writes (row, position) of each id as one number: sorting those is quicker than an argsort, and stable."""
    for i in range(rows.shape[0]):
        out[i] = (rows[i] << 32) | i


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_REASSOCIATE)  # type: ignore[untyped-decorator]
def _update(weights: Any, state: Any, packed: Any, grad: Any, lr: float, eps: float, kind: int) -> None:
    """Updates each row that `packed` (sorted) names by the sum of its gradients."""
    n, dim = grad.shape
    total = np.empty(dim, dtype=np.float32)
    i = 0
    while i < n:
        row = packed[i] >> 32
        total[:] = 0
        while i < n and packed[i] >> 32 == row:
            if i + _AHEAD < n:
                _prefetch(weights, packed[i + _AHEAD] >> 32)
                _prefetch(grad, packed[i + _AHEAD] & 0xFFFFFFFF)
            gradient = grad[packed[i] & 0xFFFFFFFF]
            for d in range(dim):
                total[d] += gradient[d]
            i += 1
        weight = weights[row]
        if kind == ROWWISE_ADAGRAD:
            square = np.float32(0.0)
            for d in range(dim):
                square += total[d] * total[d]
            state[row] += square / np.float32(dim)
            factor = lr / (np.sqrt(state[row]) + eps)
            for d in range(dim):
                weight[d] -= factor * total[d]
        elif kind == ADAGRAD:
            sums = state[row * dim : (row + 1) * dim]
            for d in range(dim):
                sums[d] += total[d] * total[d]
                weight[d] -= lr * total[d] / (np.sqrt(sums[d]) + eps)
        else:
            for d in range(dim):
                weight[d] -= lr * total[d]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, kernel: Kernel, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = kernel.rows_of(indices, offsets)
        ctx.kernel, ctx.rows = kernel, rows
        out = torch.empty(len(rows), kernel.dim)
        _take(kernel.weights().numpy(), rows, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.kernel.update(ctx.rows, grads[0].contiguous().numpy())
        return None, None, None, None


class Kernel:
    """Stands in for the forward of one FBGEMM table group (`SplitTableBatchedEmbeddingBagsCodegen`)."""

    def __init__(self, group: Any, kind: int) -> None:
        self.group, self.kind = group, kind
        specs = [(rows, dim) for rows, dim, _, _ in group.embedding_specs]
        self.dim = int(specs[0][1])
        sizes = np.array([rows for rows, _ in specs], dtype=np.int64)
        bases = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        tables = np.array(group.feature_table_map)
        self.row_base, self.num_rows = bases[tables].copy(), sizes[tables].copy()

    def weights(self) -> torch.Tensor:
        """Returns the group's tables under each other, float32 `[rows, D]`, FBGEMM's own memory."""
        return self.group.weights_host.detach().view(-1, self.dim)  # type: ignore[no-any-return]

    def rows_of(self, indices: torch.Tensor, offsets: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the row of each id in `weights`, int64.

        Raises:
            ValueError: an id outside its table.
        """
        ids, starts = indices.numpy(), offsets.numpy()
        rows = np.empty(len(ids), dtype=np.int64)
        num_samples = (len(starts) - 1) // len(self.row_base)
        bad = _flat_rows(ids, starts, num_samples, self.row_base, self.num_rows, rows)
        if bad >= 0:
            where = f"position {bad} of the lookup in tables {self.group.table_names}"
            todo = "map raw ids with `distrag prepare`; run with --debug to name the sample"
            raise problem("An id outside its table", got=int(ids[bad]), wanted="a row of the table", where=where, todo=todo)
        return rows

    def update(self, rows: np.ndarray[Any, Any], grad: np.ndarray[Any, Any]) -> None:
        """Steps the optimizer of the rows that were looked up, with the gradient `[n, D]` of the lookup."""
        lr, eps = float(self.group.learning_rate_tensor), float(self.group.optimizer_args.eps)
        state = self.group.momentum1_host.detach().view(-1).numpy() if self.kind != SGD else np.empty(0, dtype=np.float32)
        packed = np.empty_like(rows)
        _pack(rows, packed)
        packed.sort()
        _update(self.weights().numpy(), state, packed, grad, np.float32(lr), np.float32(eps), self.kind)

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: None = None) -> torch.Tensor:
        """Returns the vector of each id, `[n, D]`.

        Args:
            indices: int64 `[n]`, feature after feature.
            offsets: int64, where each sample of each feature starts; any equal number of samples a feature.
            per_sample_weights: none.
        """
        assert per_sample_weights is None, "sequence lookups carry no weights"
        return _Lookup.apply(self.group.weights_host, self, indices, offsets)  # type: ignore[no-untyped-call,no-any-return]


def replace_cpu_kernels(module: nn.Module, optimizer: str) -> int:
    """Gives every fused CPU table group under `module` the fast kernel; returns how many there were.

    Args:
        module: a sharded model.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`, as attached before sharding.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    kind = {"sgd": SGD, "adagrad": ADAGRAD, "rowwise_adagrad": ROWWISE_ADAGRAD}[optimizer]
    # TorchRec keeps its lookups in a plain list, out of sight of modules()
    lookups = [lookup for sharded in module.modules() for lookup in getattr(sharded, "_lookups", [])]
    groups = [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen) and m.use_cpu]
    for group in groups:
        group.forward = Kernel(group, kind)
    return len(groups)
