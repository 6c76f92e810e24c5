"""The plain way: one process, padded rectangles, torch.nn and torch.optim. Nothing of distrag is imported here.

It is given what distrag starts from (weights by name) and what it trains on (which samples form each step, with their ids and numbers).
It computes in float64 and keeps its weights in float32 between steps, as float32 training has to: what is left to differ is rounding of
the other side alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """One history and what belongs to it.

    Attributes:
        history: ids of each per-position feature, int64 `[L]`.
        numbers: `[L, F]`.
        context_ids: the id of each per-sample feature.
        context: `[Fc]`.
        following: the item after the history; 0 where none is known.
        negatives: items drawn for each position, int64 `[L, N]`.
        label: 0 or 1.
        weight: of its loss.
    """

    history: dict[str, Tensor]
    numbers: Tensor
    context_ids: dict[str, int]
    context: Tensor
    following: int
    negatives: Tensor
    label: float
    weight: float


@dataclass(frozen=True)
class Step:
    """One global step: its samples, and the negatives that all of them share, int64 `[N]`."""

    samples: list[Sample]
    shared: Tensor


@dataclass(frozen=True)
class Plan:
    """What is trained, and how.

    Attributes:
        encoder: name and options (`num_layers`, `num_heads`, `activation`).
        loss: name and options (`temperature`, `normalize`).
        table_of: table of each feature.
        target: the feature that is predicted; empty for labels.
        join: `concat` or `sum`.
        optimizer_of: `sgd`, `adagrad`, `rowwise_adagrad` or `adam` for each table, with its rate and eps.
        clipped_tables: tables whose gradients count in the norm that is clipped.
        lr: rate of everything else.
        betas: of Adam.
        eps: of Adam.
        weight_decay: of matrices outside the tables.
        decoupled: whether decay shrinks the weight (AdamW) or adds to the gradient (Adam).
        clip_norm: largest norm of the gradients of all but tables, and of `clipped_tables`.
        rate: share of the rates in each step, from 0 on.
    """

    encoder: dict[str, Any]
    loss: dict[str, Any]
    table_of: dict[str, str]
    target: str
    join: str
    optimizer_of: dict[str, tuple[str, float, float]]
    clipped_tables: tuple[str, ...]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    clip_norm: float
    rate: Callable[[int], float]


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum of squares a row: the mean of the squares of the row's gradient.

    Source: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation models", ISCA 2022.
    """

    def __init__(self, parameters: list[Tensor], lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros(len(p), 1, dtype=p.dtype))
                total += p.grad.square().mean(1, keepdim=True)
                p -= group["lr"] * p.grad / (total.sqrt() + group["eps"])


class Block(nn.Module):
    """Attention, then a feed-forward layer; norms come first."""

    def __init__(self, dim: int, width: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.activation = options["activation"]
        self.norm_attention, self.norm_ffn = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, options["num_heads"], batch_first=True)
        self.up, self.down = nn.Linear(dim, width * (2 if self.activation == "swiglu" else 1)), nn.Linear(width, dim)

    def forward(self, x: Tensor, hidden: Tensor, future: Tensor | None) -> Tensor:
        y = self.norm_attention(x)
        x = x + self.attention(y, y, y, key_padding_mask=hidden, attn_mask=future, need_weights=False)[0]
        y = self.up(self.norm_ffn(x))
        if self.activation == "swiglu":
            gate, value = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.gelu(y) if self.activation == "gelu" else F.relu(y))


class Model(nn.Module):
    """Padded rectangles in, states out; its parameters carry the names of those it was started from in `names`."""

    def __init__(self, plan: Plan, start: Weights) -> None:
        super().__init__()
        self.plan, self.names = plan, {}
        self.tables = nn.ModuleDict()
        for name, value in start.items():
            if ".embeddings." in name:
                table = name.split(".embeddings.")[1].removesuffix(".weight")
                self.tables[table] = nn.Embedding(*value.shape)
                self._note(name, self.tables[table].weight)
        self.dim = next(iter(self.tables.values())).embedding_dim
        self.mix, self.context = self._linear("mix", start), self._linear("context", start)
        layers = [self._linear(f"head.{i}", start) for i in range(0, 9, 2) if f"head.{i}.weight" in start]
        self.head = nn.ModuleList([layer for layer in layers if layer is not None])
        self.grus, self.blocks = nn.ModuleList(), nn.ModuleList()
        for i in range(plan.encoder.get("num_layers", 0)):
            self._add_layer(i, start)
        if self.blocks:
            first = "encoder.transformer"
            self.positions = nn.Parameter(torch.zeros(start[f"{first}.positions"].shape))
            self.norm = nn.LayerNorm(self.dim)
            self._note(f"{first}.positions", self.positions)
            self._note_all(f"{first}.norm", self.norm)
        self.load(start)

    def _note(self, name: str, parameter: Tensor) -> None:
        self.names[name] = parameter

    def _note_all(self, prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._note(f"{prefix}.{name}", parameter)

    def _linear(self, name: str, start: Weights) -> nn.Linear | None:
        if f"{name}.weight" not in start:
            return None
        wide, narrow = start[f"{name}.weight"].shape
        made = nn.Linear(narrow, wide)
        self._note_all(name, made)
        return made

    def _add_layer(self, i: int, start: Weights) -> None:
        if self.plan.encoder["name"] == "gru":
            self.grus.append(nn.GRU(self.dim, self.dim, batch_first=True))
            self._note_all(f"encoder.layers.{i}", self.grus[i])
            return
        prefix = f"encoder.transformer.blocks.{i}"
        block = Block(self.dim, start[f"{prefix}.down.weight"].shape[1], self.plan.encoder)
        self.blocks.append(block)
        for name in ("norm_attention", "norm_ffn", "up", "down"):
            self._note_all(f"{prefix}.{name}", getattr(block, name))
        self._note(f"{prefix}.qkv.weight", block.attention.in_proj_weight)
        self._note(f"{prefix}.qkv.bias", block.attention.in_proj_bias)
        self._note_all(f"{prefix}.out", block.attention.out_proj)

    @torch.no_grad()
    def load(self, start: Weights) -> None:
        assert self.names.keys() == start.keys(), (sorted(self.names), sorted(start))
        self.double()
        for name, value in start.items():
            self.names[name].copy_(value)

    def look(self, feature: str, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tables[self.plan.table_of[feature]](ids)
        return vectors

    def loss(self, step: Step) -> Tensor:
        """Returns the mean loss of a step, weighted."""
        return self._next_items(step) if self.plan.target else self._labels(step)

    def _inputs(self, samples: list[Sample]) -> Tensor:
        """Returns the vectors of histories that are not empty, `[B, T, D]`, zeros behind each."""
        pads = {name: pad_sequence([s.history[name] for s in samples], batch_first=True) for name in samples[0].history}
        numbers = pad_sequence([s.numbers.double() for s in samples], batch_first=True)
        ids = [self.look(name, padded) for name, padded in pads.items()]
        if self.plan.join == "concat" and len(ids) > 1:
            assert self.mix is not None
            x: Tensor = self.mix(torch.cat([*ids, numbers], 2))
        else:
            x = torch.stack(ids).sum(0)
            x = x if self.mix is None else x + self.mix(numbers)
        return x if self.context is None else x + self.context(self._about(samples))[:, None]

    def _about(self, samples: list[Sample]) -> Tensor:
        ids = {name: torch.tensor([s.context_ids[name] for s in samples]) for name in samples[0].context_ids}
        return torch.cat([*(self.look(name, its) for name, its in ids.items()), torch.stack([s.context for s in samples]).double()], 1)

    def _encode(self, x: Tensor, lengths: Tensor, pool: bool) -> Tensor:
        """Returns states `[B, T, D]`, or one vector a history `[B, D]`."""
        name, T = self.plan.encoder["name"], x.shape[1]
        real = torch.arange(T) < lengths[:, None]
        if name in ("mean", "sum"):
            total = (x * real[:, :, None]).cumsum(1)
            states = total / torch.arange(1, T + 1)[:, None] if name == "mean" else total
        elif name == "max":
            states = x.cummax(1).values
        elif name == "gru":
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            for gru in self.grus:
                packed = gru(packed)[0]
            states = pad_packed_sequence(packed, batch_first=True, total_length=T)[0]
        else:
            states = self._attend(x, lengths, ~real)
        if not pool:
            return states
        if name == "self_attention":
            return (states * real[:, :, None]).sum(1) / lengths[:, None]
        return states[torch.arange(len(x)), lengths - 1]

    def _attend(self, x: Tensor, lengths: Tensor, hidden: Tensor) -> Tensor:
        T = x.shape[1]
        age = (lengths[:, None] - 1 - torch.arange(T)).clamp_min(0)  # 0 is the newest event
        x = x + self.positions[age]
        future = torch.ones(T, T, dtype=torch.bool).triu(1) if self.plan.encoder["name"] == "sasrec" else None
        for block in self.blocks:
            x = block(x, hidden, future)
        x = self.norm(x)
        return x

    def _labels(self, step: Step) -> Tensor:
        filled = [b for b, s in enumerate(step.samples) if len(s.numbers)]
        pooled = self.head[0].weight.new_zeros(len(step.samples), self.dim)  # an empty history is zeros
        if filled:
            some = [step.samples[b] for b in filled]
            lengths = torch.tensor([len(s.numbers) for s in some])
            pooled = pooled.index_copy(0, torch.tensor(filled), self._encode(self._inputs(some), lengths, pool=True))
        y = torch.cat([pooled, self._about(step.samples)], 1)
        for i, layer in enumerate(self.head):
            y = layer(y if i == 0 else F.relu(y))
        labels, weights = (torch.tensor([getattr(s, name) for s in step.samples], dtype=pooled.dtype) for name in ("label", "weight"))
        return _mean(F.binary_cross_entropy_with_logits(y[:, 0], labels, reduction="none"), weights)

    def _next_items(self, step: Step) -> Tensor:
        samples = [s for s in step.samples if len(s.numbers)]
        if not samples:
            return torch.zeros((), requires_grad=True)
        lengths = torch.tensor([len(s.numbers) for s in samples])
        states = self._encode(self._inputs(samples), lengths, pool=False)
        s = torch.cat([states[b, :n] for b, n in enumerate(lengths.tolist())])
        target = self.plan.target
        y = torch.cat([torch.cat([one.history[target][1:], torch.tensor([one.following])]) for one in samples])
        weights = torch.cat([torch.full((len(one.numbers),), one.weight, dtype=torch.float64) for one in samples]) * (y != 0)
        drawn = step.shared.expand(len(y), -1) if len(step.shared) else torch.cat([one.negatives for one in samples])
        return _mean(self._item_losses(s, y, drawn), weights)

    def _item_losses(self, s: Tensor, y: Tensor, drawn: Tensor) -> Tensor:
        loss, target = self.plan.loss, self.plan.target
        if loss["name"] == "full_softmax":
            scores = s @ self.tables[self.plan.table_of[target]].weight[1:].T / loss["temperature"]
            return F.cross_entropy(scores, (y - 1).clamp_min(0), reduction="none")
        items, right = self.look(target, drawn), self.look(target, y)
        if loss.get("normalize"):
            s, items, right = (F.normalize(v, dim=-1) for v in (s, items, right))
        positive, negative = (s * right).sum(1), torch.einsum("pd,pnd->pn", s, items)
        if loss["name"] == "bce":
            each = F.binary_cross_entropy_with_logits(negative, torch.zeros_like(negative), reduction="none")
            first = F.binary_cross_entropy_with_logits(positive, torch.ones_like(positive), reduction="none")
            return first + (each * (drawn != y[:, None])).sum(1)
        scores = torch.cat([positive[:, None], negative.masked_fill(drawn == y[:, None], -math.inf)], 1) / loss["temperature"]
        return F.cross_entropy(scores, torch.zeros(len(y), dtype=torch.int64), reduction="none")


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean; 0 where nothing weighs."""
    return (losses * weights).sum() / (weights.sum() if weights.any() else 1.0)


def build_optimizers(plan: Plan, names: Weights) -> list[torch.optim.Optimizer]:
    """Returns one optimizer for each table and one or two for the rest: matrices may decay, biases and norms never."""
    made: list[torch.optim.Optimizer] = []
    for name, (kind, lr, eps) in plan.optimizer_of.items():
        p = [names[name]]
        if kind == "sgd":
            made.append(torch.optim.SGD(p, lr))
        elif kind == "adagrad":
            made.append(torch.optim.Adagrad(p, lr, eps=eps))
        elif kind == "rowwise_adagrad":
            made.append(RowWiseAdagrad(p, lr, eps))
        else:
            made.append(torch.optim.Adam(p, lr, plan.betas, eps))
    dense = [p for name, p in names.items() if name not in plan.optimizer_of]
    decayed, rest = [p for p in dense if p.ndim > 1 and plan.weight_decay], [p for p in dense if p.ndim < 2 or not plan.weight_decay]
    if decayed:
        kind_of_decay = torch.optim.AdamW if plan.decoupled else torch.optim.Adam
        made.append(kind_of_decay(decayed, plan.lr, plan.betas, plan.eps, plan.weight_decay))
    if rest:
        made.append(torch.optim.Adam(rest, plan.lr, plan.betas, plan.eps))
    return made


ROUNDING = 2.0**-18
"""What float32 may leave uncertain of a gradient, as a share of the largest one of its row: 64 units in the last place. 1e-5 was seen,
where the terms of a whole row nearly cancel."""


def train_reference(plan: Plan, start: Weights, steps: Iterable[Step], sway: int = 0) -> tuple[list[float], Weights]:
    """Returns the loss of each step and the state after the last.

    An adaptive optimizer divides a gradient by its own size. Where that is near eps, as a first one may be by chance, rounding becomes a
    finite step, in any implementation. Training once more with gradients that are off by so little tells which elements those are.

    Args:
        plan: what is trained, and how.
        start: weights by name.
        steps: what it is trained on.
        sway: a seed for putting every gradient off by what float32 rounds, up or down at random; 0 leaves them.
    """
    model, random = Model(plan, start), torch.Generator().manual_seed(sway)
    names, optimizers = model.names, build_optimizers(plan, model.names)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    full = [group["lr"] for group in groups]
    clipped = [p for name, p in names.items() if name not in plan.optimizer_of or name in plan.clipped_tables]
    losses = []
    for number, step in enumerate(steps):
        model.zero_grad(set_to_none=False)
        loss = model.loss(step)
        loss.backward()
        for p in names.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if sway:
            _sway(names.values(), random)
        if plan.clip_norm:
            torch.nn.utils.clip_grad_norm_(clipped, plan.clip_norm)
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * plan.rate(number)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for p in names.values():
                p.copy_(p.float())
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in names.items()}


def _sway(parameters: Iterable[Tensor], random: torch.Generator) -> None:
    for p in parameters:
        assert p.grad is not None
        sign = torch.randint(0, 2, p.shape, generator=random) * 2 - 1
        p.grad += torch.where(p.grad != 0, p.grad.abs().amax(-1, keepdim=True) * sign * ROUNDING, 0.0)
