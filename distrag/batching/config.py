"""The section `batching` of a run's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BatchingConfig:
    """How much a step holds, and how far the loader works ahead.

    Args:
        max_tokens: most history positions of one rank in a step, at least data.max_len; a global step holds up to world size times as many.
        global_tokens: most history positions of a global step, whatever the world size; then the loss curve does not depend on the number
            of ranks. Replaces max_tokens.
        max_samples: most samples of one rank in a step; otherwise as many as its tokens.
        bucket_steps: global steps that share one list sorted by length; 1 mixes all lengths in each step, more packs like lengths together.
        cost: a, b, c; a history of length L costs a*L + b*L^2 + c, and the plan balances ranks by it. Otherwise what
            `distrag plan --calibrate` has fitted into the run directory, or the encoder's arithmetic.
        locality: `global` gives any sample to any rank; `node` gives a rank only samples of its node's share of the rows, which are all
            that is then read (and staged, for a store that lies elsewhere) there.
        micro_batches: parts of a rank's share that encoder, head and loss see one after the other, for less memory; the numbers stay the
            same, because tables are looked up and everything is updated once for the whole share.
        prefetch: batches built ahead by a thread; 0 builds each when it is asked for.
    """

    max_tokens: int | None = 4096
    global_tokens: int | None = None
    max_samples: int | None = None
    bucket_steps: int = 1
    cost: tuple[float, float, float] | None = None
    locality: Literal["global", "node"] = "global"
    micro_batches: int = 1
    prefetch: int = 2
