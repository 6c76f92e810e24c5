"""Ids in, vectors out: the tables of a model as TorchRec EmbeddingCollections, big ones apart from small ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from distrag.embedding.config import TableSpec


class Tables(nn.Module):
    """All tables of a model: one lookup for the sharded ones, one for the replicated ones.

    Args:
        specs: the tables.
        shardings: from `build_shardings`.
        dim: width of every vector (`D`).
        init_std: standard deviation of the initial normal.
        seed: each table draws its start from (seed, its name), the same for every world size.
    """

    def __init__(self, specs: Sequence[TableSpec], shardings: dict[str, str], dim: int, *, init_std: float, seed: int) -> None:
        super().__init__()
        big = [spec for spec in specs if shardings[spec.name] != "replicated"]
        small = [spec for spec in specs if shardings[spec.name] == "replicated"]
        self.sharded_keys = [key for spec in big for key in spec.keys]
        self.replicated_keys = [key for spec in small for key in spec.keys]
        self.sharded = _collection(big, dim, init_std, seed)
        self.replicated = _collection(small, dim, init_std, seed)

    @property
    def key_order(self) -> list[str]:
        """The one order of keys that every batch must have: sharded tables' keys first."""
        return [*self.sharded_keys, *self.replicated_keys]

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Returns the vectors of every key.

        Args:
            ids: keys in `key_order`.

        Returns:
            key -> float32 `[sum of its lengths, D]`.
        """
        big, small = ids, ids
        if self.sharded is not None and self.replicated is not None:
            big, small = ids.split([len(self.sharded_keys), len(self.replicated_keys)])
        out: dict[str, torch.Tensor] = {}
        if self.sharded is not None:
            # values() of the sharded output waits for the all-to-all
            out.update({key: jagged.values() for key, jagged in self.sharded(big).items()})
        if self.replicated is not None:
            out.update({key: jagged.values() for key, jagged in self.replicated(small).items()})
        return out


def _collection(specs: list[TableSpec], dim: int, init_std: float, seed: int) -> EmbeddingCollection | None:
    if not specs:
        return None
    configs = [
        EmbeddingConfig(name=spec.name, num_embeddings=spec.num_rows, embedding_dim=dim, feature_names=list(spec.keys)) for spec in specs
    ]
    collection = EmbeddingCollection(tables=configs)
    with torch.no_grad():
        for spec in specs:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(spec.name.encode()))
            collection.embeddings[spec.name].weight.normal_(0.0, init_std, generator=generator)
    return collection
