"""A small matrix product for compiled kernels: `out += a @ b` with the results held in vector registers.

Why not a library call: a recurrent step or one head of a short history is too small for one. Why not a plain loop: a compiler keeps no
sums in registers across the inner loop, and reloading them costs half the speed or more on short rows. Measured on one AVX-512 core:
60-90 GFLOP/s, plain loops 15-45.

Trap: numba caches a compiled kernel by the file it stands in. After a change here, touch kernels.py too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

_LANES = 16  # values per vector: one AVX-512 register of float32, two of AVX2
_CONTRACT = ("contract",)  # a multiply and an add may become one instruction


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    lane = ir.Constant(ir.IntType(32), 0)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, value, lane), undefined, zeros)


def _emitter(rows: int, vectors: int, lanes: int, add: bool) -> Callable[..., Any]:
    """Returns what writes the LLVM code of one size of tile; the arguments are those of `make_tile`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(element)
        vector = ir.VectorType(element, lanes) if lanes > 1 else element

        def number(n: int) -> Any:
            return context.get_constant(types.intp, n)

        arrays = [cgutils.create_struct_proxy(t)(context, builder, value=v) for t, v in zip(signature.args[:3], args[:3], strict=True)]
        strides = [cgutils.unpack_tuple(builder, array.strides, 2) for array in arrays]
        out, a, b = (builder.bitcast(array.data, ir.IntType(8).as_pointer()) for array in arrays)
        depth = cgutils.unpack_tuple(builder, arrays[2].shape, 2)[0]
        column = builder.mul(args[4], number(size))
        row = [builder.add(args[3], number(r)) for r in range(rows)]

        def load(start: Any, offset: Any, kind: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(start, [offset]), kind.as_pointer()), align=size)

        at = [builder.gep(out, [builder.add(builder.mul(r, strides[0][0]), column)]) for r in row]
        a_row = [builder.gep(a, [builder.mul(r, strides[1][0])]) for r in row]
        b_column = builder.gep(b, [column])
        zero = ir.Constant(element, 0.0) if lanes == 1 else ir.Constant(vector, [0.0] * lanes)
        first = [[load(at[r], number(v * lanes * size), vector) if add else zero for v in range(vectors)] for r in range(rows)]
        before = builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(ir.IntType(64))
        k.add_incoming(number(0), before)
        sums = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
        builder.cbranch(builder.icmp_signed("<", k, depth), body, done)
        builder.position_at_end(body)
        b_row = builder.gep(b_column, [builder.mul(k, strides[2][0])])
        right = [load(b_row, number(v * lanes * size), vector) for v in range(vectors)]
        for r in range(rows):
            left = load(a_row[r], builder.mul(k, strides[1][1]), element)
            left = _spread(builder, left, vector) if lanes > 1 else left
            for v in range(vectors):
                sums[r][v].add_incoming(first[r][v], before)
                product = builder.fmul(left, right[v], flags=_CONTRACT)
                sums[r][v].add_incoming(builder.fadd(sums[r][v], product, flags=_CONTRACT), body)
        k.add_incoming(builder.add(k, number(1)), body)
        builder.branch(head)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(vectors):
                to = builder.bitcast(builder.gep(at[r], [number(v * lanes * size)]), vector.as_pointer())
                builder.store(sums[r][v], to, align=size)
        return context.get_dummy_value()

    return emit


def make_tile(rows: int, vectors: int, lanes: int = _LANES, *, add: bool = True) -> Callable[..., None]:
    """Returns `tile(out, a, b, i, j)` for kernels: puts a @ b into `rows` rows from i and `vectors * lanes` columns from j of `out`.

    The sum over k runs in order, one fused multiply-add after the other, so every size of tile gives the same bits.

    Args:
        rows: rows of `out` held at once.
        vectors: vectors of columns held at once.
        lanes: columns in a vector; 1 is for what is left at the right edge.
        add: whether what `out` holds is added to.
    """

    emit = _emitter(rows, vectors, lanes, add)

    def tile(context: Any, out: Any, a: Any, b: Any, i: Any, j: Any) -> Any:
        return types.void(out, a, b, types.intp, types.intp), emit

    made: Callable[..., None] = intrinsic(tile)
    return made
