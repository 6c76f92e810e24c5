"""Settings that other trainers have and this one has not, since with them N ranks would not be one: why, and what is nearest to them."""

from __future__ import annotations

import re
from typing import NamedTuple

from distrag.problem import problem


class _Absent(NamedTuple):
    pattern: str
    why: str
    instead: str


_ABSENT = (
    _Absent(
        r"momentum|nesterov",
        "fused tables have none (on the CPU the library ignores it without a word), and rows outside a step would have to move too",
        "tables.optimizer=adagrad; or tables.per_table.NAME=replicated with tables.replicated_optimizer=adam",
    ),
    _Absent(
        r"^tables\..*(decay|l2|regulari)",
        "fused tables decay only the rows of a step (on the CPU the library ignores it without a word)",
        "optim.weight_decay, which is of the dense matrices",
    ),
    _Absent(
        r"^tables\..*(clip|max_grad|max_norm)",
        "fused tables clip each lookup of each rank by itself, after dividing by the number of ranks",
        "optim.clip_norm, which clips the dense part by its norm over all ranks",
    ),
    _Absent(
        r"accum",
        "fused tables are updated by every backward, so steps that accumulate would be other steps",
        "a larger batching.global_tokens, and batching.micro_batches where that does not fit the memory",
    ),
    _Absent(
        r"^tables\..*(precision|dtype|half|fp16|bf16|fp8|int8|rounding)",
        "tables stay float32: rounded rows would drift apart between numbers of ranks",
        "train.precision, which is of the dense part",
    ),
    _Absent(
        r"^tables\..*(zch|collision|evict|admission)",
        "which row an id gets would depend on the number of ranks",
        "num_buckets in the schema of `distrag prepare`, which hashes ids once",
    ),
    _Absent(
        r"batch_size|samples_per",
        "so many samples on each rank make other steps on other numbers of ranks, and ranks of uneven work",
        "batching.global_tokens, the same steps on any number of ranks",
    ),
    _Absent(
        r"drop_last",
        "which samples are dropped would depend on the number of ranks",
        "nothing: every sample is trained once an epoch",
    ),
)


def refuse_inexact(key: str, where: str) -> None:
    """Refuses an unknown key that asks for something that would not be exact.

    Args:
        key: a dotted key that no section has.
        where: where it was given.

    Raises:
        ValueError: with the reason and the nearest exact choice.
    """
    for absent in _ABSENT:
        if re.search(absent.pattern, key.lower()):
            what = "A setting that would not be exact, so there is none"
            raise problem(
                what, got=f"{key}: {absent.why}", wanted=absent.instead, where=where, todo="leave the key out, or set that instead"
            )
