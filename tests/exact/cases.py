"""The matrix: every encoder, loss, sharding and optimizer, on one small store that has everything that ever made ranks differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from distrag.data.write import write_store

NUM_STEPS = 60
MAX_LEN = 20
ENCODERS = ("mean", "max", "sum", "gru", "sasrec", "self_attention")
LOSSES = ("sampled_softmax", "bce", "full_softmax", "binary")
SHARDINGS = ("row_wise", "table_wise", "column_wise", "replicated")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
RATES = {"sgd": 0.1, "adagrad": 0.01, "rowwise_adagrad": 0.05, "adam": 0.002}  # plain SGD shows a wrong factor, adaptive ones hide it
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro": {"batching__micro_batches": 3},
    "pipeline": {"train__pipeline": True},
    "both": {"batching__micro_batches": 2, "train__pipeline": True},
}
"""Ways to run a step, as changes of the config; all of them have to come to the same."""
EPS: dict[str, dict[str, Any]] = {"usual": {}, "large": {"tables__eps": 1e-4, "optim__eps": 1e-5}}
"""What adaptive optimizers add to the root of their state: 1e-8, where a first gradient of that size is divided by itself, rounding and
all; or so much that rounding stays what it is."""


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        encoder: name.
        loss: name.
        sharding: of all tables.
        optimizer: of all tables.
        changes: further keys of the config, `section__key`.
        reference: whether the plain reference can follow; where it cannot, as with dropout, one rank is what the others are compared with.
        step: one of STEPS.
        eps: one of EPS.
    """

    encoder: str
    loss: str
    sharding: str
    optimizer: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    reference: bool = True
    step: str = "plain"
    eps: str = "usual"

    def __str__(self) -> str:
        more = [f"{key.replace('__', '.')}={value}" for key, value in self.changes.items()]
        more += [f"step={self.step}"] * (self.step != "plain") + [f"eps={self.eps}"] * (self.eps != "usual")
        return " ".join([self.encoder, self.loss, self.sharding, self.optimizer, *more])


def matrix(step: str = "plain", eps: str = "usual") -> Iterator[Case]:
    """Yields every combination, those that are refused too, for one way to run a step."""
    for encoder, loss, sharding, optimizer in product(ENCODERS, LOSSES, SHARDINGS, OPTIMIZERS):
        yield Case(encoder, loss, sharding, optimizer, step=step, eps=eps)


FURTHER = [
    Case("sasrec", "sampled_softmax", "row_wise", "rowwise_adagrad", {"encoder__dropout": 0.3}, reference=False, eps="large"),
    Case("self_attention", "binary", "row_wise", "sgd", {"encoder__dropout": 0.3}, reference=False, eps="large"),
    Case("gru", "bce", "row_wise", "sgd", {"encoder__num_layers": 2, "batching__global_tokens": MAX_LEN}, eps="large"),
    Case("sum", "sampled_softmax", "table_wise", "rowwise_adagrad", {"model__join": "sum"}, eps="large"),
    # large tables sharded, small ones replicated
    Case("max", "bce", "row_wise", "rowwise_adagrad", {"tables__shard_rows": 20, "optim__clip_norm": 0.05}, eps="large"),
    Case("gru", "sampled_softmax", "row_wise", "sgd", {"loss__normalize": True, "loss__temperature": 0.1}, eps="large"),
    Case("sasrec", "bce", "row_wise", "sgd", {"encoder__activation": "swiglu", "encoder__num_heads": 2}, eps="large"),
    Case("gru", "binary", "row_wise", "sgd", {"optim__name": "adamw", "optim__weight_decay": 0.1}, eps="large"),
    Case("mean", "binary", "row_wise", "sgd", {"optim__weight_decay": 0.1}, eps="large"),
    Case("mean", "sampled_softmax", "row_wise", "sgd", {"tables__per_table": {"kind": "table_wise", "age": "replicated"}}, eps="large"),
    Case("gru", "sampled_softmax", "row_wise", "adagrad", {"data__truncate": "random_window", "tables__cpu_kernel": "fbgemm"}, eps="large"),
]
"""Cases beside the matrix, for what other keys of the config change."""


def thinned() -> list[Case]:
    """Returns cases that hold each encoder, each loss, each pair of sharding and optimizer, each way to run a step, and FURTHER."""
    return [
        Case("mean", "bce", "row_wise", "sgd"),
        Case("max", "sampled_softmax", "row_wise", "adagrad", eps="large"),
        Case("sasrec", "bce", "row_wise", "rowwise_adagrad", step="both"),
        Case("gru", "binary", "table_wise", "sgd"),
        Case("sum", "bce", "table_wise", "adagrad", eps="large"),
        Case("self_attention", "binary", "table_wise", "rowwise_adagrad", step="micro", eps="large"),
        Case("gru", "sampled_softmax", "column_wise", "sgd", step="pipeline", eps="large"),
        Case("sasrec", "binary", "column_wise", "adagrad", eps="large"),
        Case("sum", "full_softmax", "replicated", "sgd", step="micro", eps="large"),
        Case("max", "binary", "replicated", "adagrad"),
        Case("sasrec", "full_softmax", "replicated", "adam", eps="large"),
        *FURTHER,
    ]


def build_store(path: Path) -> Path:
    """Writes few samples of very different lengths, none and one among them; returns the folder.

    Items are Zipf, so ids repeat inside and across ranks; some are unknown (row 0), so targets are masked; `seen` and `last` share the
    table of `item`; weights differ and some are 0.
    """
    random = np.random.default_rng(5)
    lengths = np.concatenate([[0, 1, 2, 30, 0, 3], random.integers(0, 25, 34)])
    total, n = int(lengths.sum()), len(lengths)
    items = random.zipf(1.4, total) % 60
    items[random.random(total) < 0.06] = 0
    weight = random.uniform(0.5, 2.0, n).astype(np.float32)
    weight[[3, 11]] = 0.0
    write_store(
        path,
        history={
            "item": items,
            "seen": random.integers(0, 60, total),
            "kind": random.integers(0, 7, total),
            "price": random.normal(size=total).astype(np.float32),
            "time": random.integers(0, 10**6, total).cumsum(),
        },
        offsets=np.concatenate([[0], lengths.cumsum()]),
        context={
            "last": random.integers(0, 60, n),
            "age": random.integers(0, 9, n),
            "income": random.normal(size=n).astype(np.float32),
        },
        label=random.integers(0, 2, n),
        weight=weight,
        features={"time": {"kind": "time", "gap": "bucket"}, "seen": {"table": "item"}, "last": {"table": "item"}},
        tables={"item": 60},
    )
    return path


def config(case: Case, store: Path, run_dir: Path) -> dict[str, Any]:
    """Returns the config of a case: a step holds about five histories, so that ranks are uneven, or two, so that some are empty."""
    conversion, replicated = case.loss == "binary", case.sharding == "replicated"
    few = case.sharding in ("table_wise", "column_wise")
    dim = 48 if case.sharding == "column_wise" else 16  # 48 can be cut for 1, 2, 3 and 4 ranks
    sections: dict[str, Any] = {
        "task": "conversion" if conversion else "next_item",
        "data": {"path": str(store), "max_len": MAX_LEN, "split": {"kind": "row" if conversion else "leave_one_out"}},
        "batching": {"global_tokens": MAX_LEN if few else 2 * MAX_LEN, "prefetch": 0},
        "model": {"dim": dim},
        "encoder": {"name": case.encoder, "dropout": 0.0},
        "loss": {"name": case.loss},
        "tables": {"shard_rows": 1, "sharding": case.sharding, "optimizer": "sgd" if replicated else case.optimizer},
        "optim": {"lr": 0.002, "table_lr": RATES[case.optimizer], "warmup_steps": 4, "schedule": "cosine"},
        "train": {"max_steps": NUM_STEPS, "log_every": 1, "run_dir": str(run_dir), "tensorboard": False, "device": "cpu"},
    }
    if replicated:
        sections["tables"]["replicated_optimizer"] = case.optimizer
        sections["optim"]["lr"] = 0.01 if case.optimizer == "sgd" else 0.002
    if case.loss in ("sampled_softmax", "bce"):
        sections["loss"]["num_negatives"] = 8 if case.loss == "sampled_softmax" else 3
    for key, value in {**EPS[case.eps], **STEPS[case.step], **case.changes}.items():
        section, _, name = key.partition("__")
        sections[section] = {**sections[section], name: value}
    return sections
