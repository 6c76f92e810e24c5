"""embedding -> encoder -> head or loss: the whole model on one screen, an ordinary module."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distrag import ragged
from distrag.loss.targets import ConversionTargets, NextItemTargets

if TYPE_CHECKING:
    from distrag.batch import RaggedBatch
    from distrag.embedding.tables import Tables


@dataclass(frozen=True)
class ModelConfig:
    """The model's width and how features are joined.

    Args:
        dim: width of every vector (`D`).
        join: how the features of a position become one vector: concat (then linear) or sum.
        head_hidden: widths of the hidden layers of the conversion head.
    """

    dim: int = 64
    join: str = "concat"
    head_hidden: tuple[int, ...] = (64,)


@dataclass(frozen=True)
class Inputs:
    """Which keys and numbers of a RaggedBatch the model reads, and for which task.

    Attributes:
        task: `next_item` or `conversion`.
        history_keys: keys with one id per history position.
        num_numbers: width of `RaggedBatch.numbers` (`F`).
        context_keys: keys with one id per sample.
        num_context: width of `RaggedBatch.context` (`Fc`).
        target: the history key that next_item predicts; its table ranks items.
        target_table: name of that table.
        num_items: rows of that table, the unknown row included (`V`).
    """

    task: str
    history_keys: tuple[str, ...]
    num_numbers: int
    context_keys: tuple[str, ...]
    num_context: int
    target: str = ""
    target_table: str = ""
    num_items: int = 0


class SequenceModel(nn.Module):
    """Ragged histories in, `(loss sum, count)` out.

    Args:
        config: width and join.
        inputs: what to read of a batch.
        tables: the embedding tables.
        encoder: one of ENCODERS.
        loss: one of LOSSES.
        seed: of the dropout masks.
        autocast: dtype of the dense part (bfloat16), or None for float32; tables and loss stay float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        inputs: Inputs,
        tables: Tables,
        encoder: Any,
        loss: Any,
        *,
        seed: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        D = config.dim
        self.inputs, self.seed, self.autocast, self.join = inputs, seed, autocast, config.join
        self.tables, self.encoder, self.loss = tables, encoder, loss
        # as in nn.Dropout, a module calls the share it drops `p`; keys that nobody asks for cost more than mean pooling
        self.drops = any(getattr(module, "p", 0.0) > 0.0 for module in encoder.modules())
        num_ids, num_context = len(inputs.history_keys), len(inputs.context_keys)
        wide = D * num_ids if config.join == "concat" and num_ids > 1 else 0
        self.mix = nn.Linear(wide + inputs.num_numbers, D) if wide + inputs.num_numbers else None
        context_width = D * num_context + inputs.num_context
        self.head: nn.Module | None = None
        self.context: nn.Linear | None = None
        if inputs.task == "conversion":
            self.head = _mlp([D + context_width, *config.head_hidden, 1])
        elif context_width:
            self.context = nn.Linear(context_width, D)

    def forward(self, batch: RaggedBatch, found: dict[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss of this rank's batch as a sum and what that sum is to be divided by, float32 `[]` each.

        Args:
            batch: this rank's share of a step, or a part of it.
            found: vectors of the sharded keys of that part, where the whole share has been looked up before.
        """
        vectors = self.tables(batch.ids, found)
        if self.inputs.task == "conversion":
            total, count = self.loss(ConversionTargets(self._logits(batch, vectors), batch.labels, batch.weights))
        else:
            total, count = self.loss(self._next_items(batch, vectors))
        return self.tables.boundary.close(total), count

    def predict(self, batch: RaggedBatch) -> torch.Tensor:
        """Returns one logit per sample, float32 `[B]` (conversion)."""
        return self._logits(batch, self.tables(batch.ids))

    def query(self, batch: RaggedBatch) -> torch.Tensor:
        """Returns the vector that ranks items for each sample by dot product, float32 `[B, D]` (next_item)."""
        vectors = self.tables(batch.ids)
        with self._precision(batch.numbers):
            pooled = self.encoder.pool(self._positions(batch, vectors), batch.offsets, None)
        return pooled.float()  # type: ignore[no-any-return]

    def _keys(self, batch: RaggedBatch) -> torch.Tensor | None:
        if not (self.training and self.drops):
            return None
        return ragged.position_keys(batch.samples, batch.offsets, seed=self.seed, epoch=batch.epoch, step=batch.step)

    def _precision(self, x: torch.Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def _positions(self, batch: RaggedBatch, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Joins the features of each history position into `[sum_L, D]`."""
        ids = [vectors[key] for key in self.inputs.history_keys]
        concat = self.join == "concat" and len(ids) > 1
        parts = [*ids, batch.numbers] if concat else [batch.numbers]
        x = torch.zeros(()) if self.mix is None else self.mix(torch.cat(parts, 1))
        if not concat and ids:
            total = ids[0] if len(ids) == 1 else torch.stack(ids).sum(0)
            x = total if self.mix is None else total + x
        if self.context is not None:
            x = x + self.context(self._context(batch, vectors)).repeat_interleave(batch.lengths, 0, output_size=batch.num_tokens)
        return x

    def _context(self, batch: RaggedBatch, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([*(vectors[key] for key in self.inputs.context_keys), batch.context], 1)

    def _logits(self, batch: RaggedBatch, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.head is not None
        with self._precision(batch.numbers):
            pooled = self.encoder.pool(self._positions(batch, vectors), batch.offsets, self._keys(batch))
            logits = self.head(torch.cat([pooled, self._context(batch, vectors)], 1))
        return logits.float()[:, 0]  # type: ignore[no-any-return]

    def _next_items(self, batch: RaggedBatch, vectors: dict[str, torch.Tensor]) -> NextItemTargets:
        target, offsets = self.inputs.target, batch.offsets
        with self._precision(batch.numbers):
            states = self.encoder(self._positions(batch, vectors), offsets, self._keys(batch))
        ids = ragged.shift_next(batch.ids[target].values(), offsets, batch.ids[f"{target}:next"].values())
        wants_vectors = not self.loss.needs_table
        negative_ids, negative_vectors = self._negatives(batch, vectors)
        return NextItemTargets(
            states=states.float(),
            target_ids=ids,
            weights=batch.weights.repeat_interleave(batch.lengths, output_size=batch.num_tokens),
            target_vectors=ragged.shift_next(vectors[target], offsets, vectors[f"{target}:next"]) if wants_vectors else None,
            negative_ids=negative_ids,
            negative_vectors=negative_vectors,
            item_vectors=self._item_vectors() if self.loss.needs_table else None,
        )

    def _negatives(self, batch: RaggedBatch, vectors: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.loss.negatives == "none":
            return None, None
        key = f"{self.inputs.target}:negative"
        ids, found = batch.ids[key].values(), vectors[key]
        if self.loss.negatives == "per_position":
            P = batch.num_tokens
            N = len(ids) // P if P else 1
            return ids.view(P, N), found.view(P, N, found.shape[1])
        return ids, found

    def _item_vectors(self) -> torch.Tensor:
        assert self.tables.replicated is not None
        return self.tables.replicated.embeddings[self.inputs.target_table].weight  # type: ignore[no-any-return]


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)
