"""The lookup of a world of one rank: the table is read in place, because there is nobody to exchange ids and vectors with.

TorchRec packs, splits and permutes for its collectives whatever the number of ranks; alone that costs 0.7 ms a step on the CPU, as much
as the rest of a small step of mean pooling. The collection, its tables, optimizer and checkpoints stay TorchRec's; tests hold this lookup
equal to the exchanged one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchrec import JaggedTensor

from distrag.embedding.cpu_kernel import Kernel

if TYPE_CHECKING:
    from torch import nn
    from torchrec import KeyedJaggedTensor


def skip_exchange(module: nn.Module) -> int:
    """Gives every sharded collection under `module` the direct lookup; returns how many there were.

    Args:
        module: a model sharded over one rank, its CPU kernels already replaced.
    """
    collections: list[Any] = [collection for collection in module.modules() if hasattr(collection, "_lookups")]
    for collection in collections:
        tables = [table for lookup in collection._lookups for table in lookup._emb_modules]
        collection.forward = _Direct([(table._config.feature_names(), table.emb_module.forward) for table in tables])
    return len(collections)


class _Direct:
    """Stands in for the forward of one sharded collection."""

    def __init__(self, groups: list[tuple[list[str], Kernel]]) -> None:
        assert all(isinstance(kernel, Kernel) for _, kernel in groups), "replace the CPU kernels first"
        self.groups = groups

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns key -> vectors `[sum of its lengths, D]` with the lengths of the key."""
        place = {key: k for k, key in enumerate(ids.keys())}
        bounds, lengths = ids.offset_per_key(), ids.lengths().view(len(place), -1)
        out: dict[str, JaggedTensor] = {}
        for names, kernel in self.groups:
            places = [place[name] for name in names]
            sizes = [bounds[k + 1] - bounds[k] for k in places]
            parts = [ids.values()[bounds[k] : bounds[k + 1]] for k in places]
            values = parts[0] if len(parts) == 1 else torch.cat(parts)
            found = kernel(values, torch.from_numpy(np.cumsum([0, *sizes])))
            # A split of one piece would copy the whole gradient on its way back.
            pieces = (found,) if len(sizes) == 1 else found.split(sizes)  # type: ignore[no-untyped-call]
            out.update({name: JaggedTensor(piece, lengths=lengths[k]) for name, k, piece in zip(names, places, pieces, strict=True)})
        return out
