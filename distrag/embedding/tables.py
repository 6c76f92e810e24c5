"""Ids in, vectors out: the tables of a model as TorchRec EmbeddingCollections, big ones apart from small ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from distrag.embedding.boundary import Boundary
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
        self.boundary = Boundary()
        self._begun: tuple[KeyedJaggedTensor, Any, Any] | None = None

    @property
    def key_order(self) -> list[str]:
        """The one order of keys that every batch must have: sharded tables' keys first."""
        return [*self.sharded_keys, *self.replicated_keys]

    def forward(self, ids: KeyedJaggedTensor, found: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Returns the vectors of every key.

        Args:
            ids: keys in `key_order`.
            found: vectors of the sharded keys, where they have been looked up before.

        Returns:
            key -> float32 `[sum of its lengths, D]`.
        """
        out = self.boundary.watch(self.boundary.cut(self.look_up(ids)) if found is None else found)
        if self.replicated is not None:
            small = ids if self.sharded is None else ids.split([len(self.sharded_keys), len(self.replicated_keys)])[1]
            out.update({key: jagged.values() for key, jagged in self.replicated(small).items()})
        return out

    def look_up(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Returns the vectors of the keys of sharded tables: the lookup that all ranks make together."""
        if self.sharded is None:
            return {}
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is ids:
            found = self.sharded.compute_and_output_dist(begun[1], begun[2].wait())
        else:
            self._begun = begun
            found = self.sharded(self._sharded_ids(ids))
        # values() waits for the all-to-all
        return {key: jagged.values() for key, jagged in found.items()}

    def begin(self, ids: KeyedJaggedTensor) -> None:
        """Begins the exchange of the ids of a later `look_up`, which need no weights; the ranks do so at the same place."""
        if self.sharded is not None:
            context = self.sharded.create_context()
            self._begun = ids, context, self.sharded.input_dist(context, self._sharded_ids(ids))

    def go_on(self) -> None:
        """Sends the ids of the exchange that was begun, now that every rank knows how many there are."""
        if self._begun is not None:
            ids, context, sizes = self._begun
            self._begun = ids, context, sizes.wait()

    def _sharded_ids(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return ids if self.replicated is None else ids.split([len(self.sharded_keys), len(self.replicated_keys)])[0]


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
