"""distrag trains sequence recommenders on ragged user histories, from one process to many GPUs.

Public names load on first use, so that `import distrag` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrag.batch import RaggedBatch
    from distrag.batching.plan import EpochPlan, plan_epoch
    from distrag.batching.sampler import TokenBudgetSampler
    from distrag.data.store import open_store
    from distrag.encoder import ENCODERS
    from distrag.loss import LOSSES
    from distrag.training.loop import RunResult, train

_HOME = {
    "ENCODERS": "distrag.encoder",
    "LOSSES": "distrag.loss",
    "EpochPlan": "distrag.batching.plan",
    "RaggedBatch": "distrag.batch",
    "RunResult": "distrag.training.loop",
    "TokenBudgetSampler": "distrag.batching.sampler",
    "open_store": "distrag.data.store",
    "plan_epoch": "distrag.batching.plan",
    "train": "distrag.training.loop",
}

__all__ = [
    "ENCODERS",
    "LOSSES",
    "EpochPlan",
    "RaggedBatch",
    "RunResult",
    "TokenBudgetSampler",
    "open_store",
    "plan_epoch",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distrag' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
