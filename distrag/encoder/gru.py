"""Gated recurrent units that walk each history from its oldest to its newest event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from distrag import ragged
from distrag.encoder import kernels
from distrag.encoder.checks import check_at_least, check_share

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class GRUConfig:
    """Options of the recurrent encoder.

    Args:
        num_layers: recurrent layers on top of each other.
        dropout: share of the vectors dropped before the first layer and between layers while training.
    """

    num_layers: int = 1
    dropout: float = 0.0


class GRU(nn.Module):
    """The state of a gated recurrent unit after each position; causal, linear in the length.

    Each layer holds torch's own single-layer `nn.GRU`, so parameter names, layout and start values are known ones. On the CPU a compiled
    kernel walks the ragged rows with a hand-written backward; elsewhere the same parameters run through the library's packed sequences.

    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder", 2014; Hidasi et al., "Session-based recommendations
    with recurrent neural networks", 2016.
    """

    causal: ClassVar[bool] = True
    Config: ClassVar[type[GRUConfig]] = GRUConfig

    def __init__(self, config: GRUConfig, dim: int, max_len: int) -> None:
        super().__init__()
        check_at_least(1, config.num_layers, "encoder.num_layers")
        check_share(config.dropout, "encoder.dropout")
        self.p = config.dropout
        self.layers = nn.ModuleList(nn.GRU(dim, dim) for _ in range(config.num_layers))

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the state after each position, `[sum_L, D]`.

        Args:
            x: vectors `[sum_L, D]`.
            offsets: int64 `[B+1]`.
            keys: int64 `[sum_L]`, dropout keys; None in training takes torch's generator.
        """
        order = None
        for site, layer in enumerate(self.layers):
            weights = list(layer.parameters())
            x = ragged.dropout(x, self.p if self.training else 0.0, keys, site).to(weights[0].dtype)
            if ragged.has_kernel(x, *weights):
                with torch.autocast("cpu", enabled=False):  # the kernel has no half precision
                    x = _kernel_gru(x, *weights, offsets)
            elif x.shape[0]:
                order = order or _time_major(offsets)
                x = packed_gru(cast("nn.GRU", layer), x, *order)
            else:
                x = x + 0.0 * sum(weight.sum() for weight in weights)  # zero gradients, not none: DDP waits for each of them
        return x

    def pool(self, x: Tensor, offsets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the state after the newest position of each history, zeros for an empty one, `[B, D]`."""
        return ragged.last(self(x, offsets, keys), offsets)

    @staticmethod
    def cost(config: GRUConfig, dim: int) -> tuple[float, float, float]:
        """Returns (a, b, c) of the cost a*L + b*L^2 + c of a sequence of length L."""
        return 1.0, 0.0, 0.0


def _time_major(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers in the order (time, longest sequence first), and how many sequences run at each time (on the CPU, as cuDNN wants)."""
    ends = offsets.cpu()
    lengths = ends.diff()
    P = int(ends[-1])
    rank = torch.empty_like(lengths)
    rank[torch.argsort(lengths, descending=True, stable=True)] = torch.arange(lengths.shape[0])
    owner = ragged.segment_ids(ends, P)
    time = torch.arange(P) - ends[:-1][owner]
    rows = torch.argsort(time * lengths.shape[0] + rank[owner])
    return rows.to(offsets.device), torch.bincount(time)


def packed_gru(gru: nn.GRU, x: Tensor, rows: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the states `[sum_L, D]` by torch's packed sequences: cuDNN on CUDA, and the twin the kernel is tested against.

    Args:
        gru: one layer.
        x: `[sum_L, D]`, at least one row.
        rows: int64 `[sum_L]`, row numbers in time-major order.
        batch_sizes: int64 `[L]` on the CPU.
    """
    states = gru(PackedSequence(x.index_select(0, rows), batch_sizes))[0].data
    return torch.zeros_like(states).index_copy(0, rows, states)


class _RaggedGRU(torch.autograd.Function):
    """One layer on the CPU. The matrix products over all positions are library calls, only the recurrence runs in the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, offsets: Tensor) -> Tensor:
        gates = torch.addmm(b_ih, x, w_ih.t())
        hidden, inner = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape)
        w_hh_t = w_hh.detach().t().contiguous()
        order = torch.argsort(offsets.diff(), descending=True, stable=True)
        given = (gates, w_hh_t, b_hh.detach(), offsets, order)
        kernels.gru_forward(*(t.numpy() for t in (*given, hidden, inner)))
        ctx.save_for_backward(x, w_ih, w_hh, offsets, order, gates, hidden, inner)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_ih, w_hh, offsets, order, gates, hidden, inner = (t.detach() for t in ctx.saved_tensors)
        D = x.shape[1]
        d_gates, d_inner, before = torch.empty_like(gates), torch.empty_like(inner), torch.empty_like(inner)
        given = (grad.contiguous(), gates, inner, hidden, w_hh.contiguous(), offsets, order)
        kernels.gru_backward((d_gates.numpy(), d_inner.numpy(), before.numpy()), *(t.numpy() for t in given))
        b_ih = d_gates.sum(0)
        return (
            d_gates @ w_ih if ctx.needs_input_grad[0] else None,
            d_gates.t() @ x,
            torch.cat([d_gates[:, : 2 * D].t() @ before, d_inner.t() @ before]),
            b_ih,
            torch.cat([b_ih[: 2 * D], d_inner.sum(0)]),
            None,
        )


_kernel_gru: Callable[..., Tensor] = _RaggedGRU.apply
