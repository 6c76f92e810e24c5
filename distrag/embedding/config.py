"""Which tables there are and how each is kept; free of torch, so that plans print without loading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distrag.problem import problem

SHARDINGS = ("row_wise", "table_wise", "column_wise", "replicated")
FUSED_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")
TABLE_OPTIMIZERS = (*FUSED_OPTIMIZERS, "adam")


@dataclass(frozen=True)
class TablesConfig:
    """Which tables are sharded, how, and with which optimizer.

    Args:
        shard_rows: from how many rows on a table is sharded; smaller ones are replicated.
        sharding: how big tables are kept: row_wise, table_wise, column_wise or replicated.
        per_table: table name -> row_wise, table_wise, column_wise or replicated; wins over the threshold.
        optimizer: of sharded tables, fused into the backward: rowwise_adagrad, adagrad, sgd (and adam on CUDA).
        replicated_optimizer: of replicated tables: adam, adagrad or sgd.
        init_std: standard deviation of the normal that tables start from.
        eps: added to the root of the optimizer state of sharded tables.
        max_gib_per_rank: refuse a plan that needs more GiB of tables and optimizer state on one rank; 0 asks the device.
        cpu_kernel: `numba` updates sharded tables on CPU with distrag's kernel, `fbgemm` with the library's own.
    """

    shard_rows: int = 10_000
    sharding: str = "row_wise"
    per_table: dict[str, str] = field(default_factory=dict)
    optimizer: str = "rowwise_adagrad"
    replicated_optimizer: str = "adam"
    init_std: float = 0.02
    eps: float = 1e-8
    max_gib_per_rank: float = 0.0
    cpu_kernel: str = "numba"


@dataclass(frozen=True)
class TableSpec:
    """One table: its name, its rows (row 0 is the unknown row) and the keys that read it."""

    name: str
    num_rows: int
    keys: tuple[str, ...]


def build_shardings(specs: Sequence[TableSpec], config: TablesConfig) -> dict[str, str]:
    """Returns how each table is kept: row_wise, table_wise, column_wise or replicated.

    Raises:
        ValueError: an unknown table, sharding or optimizer, or a combination that would not be exact.
    """
    names = {spec.name for spec in specs}
    for name, kind in config.per_table.items():
        if name not in names:
            raise _refuse("A table that does not exist", name, sorted(names), f"tables.per_table.{name}", "name one of the tables")
        if kind not in SHARDINGS:
            raise _refuse("An unknown sharding", kind, SHARDINGS, f"tables.per_table.{name}", "choose one of these")
    if config.sharding not in SHARDINGS:
        raise _refuse("An unknown sharding", config.sharding, SHARDINGS, "tables.sharding", "choose one of these")
    big = {spec.name: config.sharding if spec.num_rows >= config.shard_rows else "replicated" for spec in specs}
    chosen = {**big, **config.per_table}
    if "column_wise" in chosen.values() and config.optimizer == "rowwise_adagrad":
        raise _refuse(
            "column_wise keeps one row-wise Adagrad state per shard, which is other mathematics than one process",
            "tables.optimizer rowwise_adagrad",
            "adagrad or sgd",
            "table " + ", ".join(name for name, kind in chosen.items() if kind == "column_wise"),
            "set --tables.optimizer=adagrad, or --tables.sharding=row_wise",
        )
    return chosen


def check_optimizer(config: TablesConfig, device: str) -> None:
    """Refuses a fused optimizer that does not exist, or not on this device.

    Args:
        config: the section `tables`.
        device: `cpu`, or any other word for a device that has all of them.

    Raises:
        ValueError: naming optimizer, device and those there are.
    """
    allowed = FUSED_OPTIMIZERS if device == "cpu" else TABLE_OPTIMIZERS
    if config.optimizer not in allowed:
        todo = "choose one of these, or replicate the table (tables.per_table) to train it with Adam"
        raise _refuse("No such fused optimizer on this device", f"{config.optimizer} on {device}", allowed, "tables.optimizer", todo)


def check_widths(shardings: dict[str, str], dim: int, world_size: int) -> None:
    """Refuses a width that sharded tables cannot have: their kernels read rows of 4 values, and column_wise cuts a row once for each rank.

    Args:
        shardings: from `build_shardings`.
        dim: width of every table.
        world_size: number of ranks.

    Raises:
        ValueError: naming the table and the nearest widths.
    """
    for name, kind in shardings.items():
        step = {"replicated": 1, "column_wise": 4 * world_size}.get(kind, 4)
        if dim % step:
            near = sorted({max(step, dim // step * step), (dim // step + 1) * step})
            raise _refuse(
                "A width that a sharded table cannot have",
                f"model.dim {dim}, {kind} on {world_size} ranks",
                f"a multiple of {step}, such as {' or '.join(map(str, near))}",
                f"table {name!r}",
                "set --model.dim, or replicate the table (tables.per_table)",
            )


def _refuse(what: str, got: object, wanted: object, where: str, todo: str) -> ValueError:
    return problem(what, got=got, wanted=wanted, where=where, todo=todo)
