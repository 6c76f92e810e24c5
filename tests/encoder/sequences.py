"""Small ragged inputs for the encoder tests."""

from __future__ import annotations

from typing import Any

import torch

from distrag import ragged
from distrag.encoder import ENCODERS

DIM, MAX_LEN = 8, 50
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ENCODERS},
    "gru of two layers": ("gru", {"num_layers": 2}),
    "sasrec of four heads, swiglu": ("sasrec", {"num_heads": 4, "activation": "swiglu", "ffn_factor": 2.0}),
    "self_attention of two layers, one head": ("self_attention", {"num_layers": 2, "num_heads": 1}),
}


def build(variant: str, dim: int = DIM, **more: Any) -> Any:
    """An encoder in evaluation mode, with start values that do not depend on the order of the tests."""
    name, options = VARIANTS[variant]
    kind: Any = ENCODERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(kind.Config(**options, **more), dim, MAX_LEN).eval()


def inputs(lengths: list[int], dim: int = DIM, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors `[sum_L, D]` that want a gradient, and offsets."""
    offsets = ragged.lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(offsets[-1]), dim, dtype=dtype, generator=generator).requires_grad_(), offsets
