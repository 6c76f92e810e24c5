"""Multi-head attention inside each ragged sequence, and the transformer block made of it.

Three ways compute the same numbers: a compiled kernel on the CPU, torch's variable-length kernel on CUDA in half precision, and
rectangles of similar length elsewhere. Linear layers, norms and the feed-forward part always run flat on `[sum_L, D]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distrag import ragged
from distrag.encoder import kernels
from distrag.encoder.checks import check_at_least, check_choice, check_heads, check_share
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = ("relu", "gelu", "swiglu")


class TransformerConfig(Protocol):
    """What a config needs for a stack of blocks."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def dropout(self) -> float: ...  # noqa: D102
    @property
    def ffn_factor(self) -> float: ...  # noqa: D102
    @property
    def activation(self) -> str: ...  # noqa: D102


def attend(qkv: Tensor, offsets: Tensor, num_heads: int, *, causal: bool, max_len: int) -> Tensor:
    """Returns softmax(q k / sqrt(D / H)) v inside each sequence and head, `[sum_L, D]`; no position sees another sequence.

    Args:
        qkv: queries, keys, values beside each other, `[sum_L, 3D]`.
        offsets: int64 `[B+1]`.
        num_heads: H, divides D.
        causal: whether a position sees only itself and older ones.
        max_len: no sequence is longer; saves waiting for the device.
    """
    D = qkv.shape[1] // 3
    if qkv.shape[0] == 0:
        return qkv[:, :D]
    if ragged.has_kernel(qkv):
        return _kernel_attention(qkv, offsets, num_heads, causal)
    if qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16) and D // num_heads % 8 == 0:
        return _varlen_attention(qkv, offsets, num_heads, causal, max_len)
    return grouped_attention(qkv, offsets, num_heads, causal=causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, offsets: Tensor, num_heads: int, causal: bool) -> Tensor:
        qkv = qkv.detach().contiguous()
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
        log_sum = qkv.new_empty(qkv.shape[0], num_heads)
        longest = int(offsets.diff().max())
        kernels.attention_forward(qkv.numpy(), offsets.numpy(), num_heads, causal, longest, out.numpy(), log_sum.numpy())
        ctx.save_for_backward(qkv, offsets, out, log_sum)
        ctx.num_heads, ctx.causal, ctx.longest = num_heads, causal, longest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, offsets, out, log_sum = (t.detach().numpy() for t in ctx.saved_tensors)
        d_qkv = torch.empty(qkv.shape, dtype=grad.dtype)
        options = ctx.num_heads, ctx.causal, ctx.longest
        kernels.attention_backward(grad.contiguous().numpy(), qkv, offsets, options, out, log_sum, d_qkv.numpy())
        return d_qkv, None, None, None


_kernel_attention: Callable[..., Tensor] = _Attention.apply


def _varlen_attention(qkv: Tensor, offsets: Tensor, num_heads: int, causal: bool, max_len: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)  # type: ignore[no-untyped-call]
    bounds = offsets.to(torch.int32)
    out = varlen_attn(query, key, value, bounds, bounds, max_len, max_len, window_size=(-1, 0) if causal else (-1, -1))
    assert isinstance(out, Tensor)
    return out.flatten(1)


def grouped_attention(qkv: Tensor, offsets: Tensor, num_heads: int, *, causal: bool) -> Tensor:
    """Returns what `attend` does, by one padded rectangle per group of similar lengths: any device and dtype, and the twin of the kernels.

    A padded cell repeats the newest row of its own sequence, so nothing foreign or infinite enters, and its result is thrown away.
    Masks are boolean: no constant has to fit a dtype, and no query is without a key.
    """
    lengths = offsets.diff()
    P, D = qkv.shape[0], qkv.shape[1] // 3
    results, cells, done = [], torch.empty(P, dtype=torch.int64, device=qkv.device), 0
    for group in ragged.length_groups(lengths):
        size = lengths[group]
        T = int(size[-1])
        column = torch.arange(T, device=qkv.device)
        rows = offsets[group][:, None] + torch.minimum(column, size[:, None] - 1)
        real = column < size[:, None]
        block = qkv.index_select(0, rows.flatten()).view(len(group), T, 3, num_heads, D // num_heads)
        query, key, value = block.permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if causal else real[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        results.append(out.transpose(1, 2).reshape(-1, D))
        cells[rows[real]] = done + real.flatten().nonzero()[:, 0]
        done += len(group) * T
    return torch.cat(results).index_select(0, cells)


class Block(nn.Module):
    """One pre-norm transformer block: attention and a feed-forward layer, each added to what came in.

    Source: Vaswani et al., "Attention is all you need", 2017; Xiong et al., "On layer normalization in the transformer architecture",
    2020 (norm first); Shazeer, "GLU variants improve transformer", 2020 (swiglu).
    """

    bias_mask: Tensor

    def __init__(self, config: TransformerConfig, dim: int, max_len: int, *, causal: bool, site: int) -> None:
        super().__init__()
        self.num_heads, self.p, self.activation = config.num_heads, config.dropout, config.activation
        self.max_len, self.causal, self.site = max_len, causal, site
        width = max(1, round(dim * config.ffn_factor))
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        # Softmax does not see a bias of the keys: its gradient is rounding noise, which Adam would blow up to full steps, other ones on
        # every number of ranks. The mask keeps it out; the layout stays the one of torch's MultiheadAttention.
        self.register_buffer("bias_mask", torch.ones(3, dim).index_fill_(0, torch.tensor([1]), 0.0).flatten(), persistent=False)
        self.out = nn.Linear(dim, dim)
        self.norm_ffn = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * width if config.activation == "swiglu" else width)
        self.down = nn.Linear(width, dim)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None) -> Tensor:
        """Returns `[sum_L, D]` from `x` `[sum_L, D]`."""
        p = self.p if self.training else 0.0
        mixed = attend(self._project(self.norm_attention(x)), offsets, self.num_heads, causal=self.causal, max_len=self.max_len)
        x = x + ragged.dropout(self.out(mixed), p, keys, self.site)
        inner = ragged.dropout(self._activate(self.up(self.norm_ffn(x))), p, keys, self.site + 1)
        return x + ragged.dropout(self.down(inner), p, keys, self.site + 2)

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv.weight, self.qkv.bias * self.bias_mask)

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, value = x.chunk(2, 1)
            return F.silu(gate) * value
        return F.gelu(x) if self.activation == "gelu" else F.relu(x)


class Transformer(nn.Module):
    """Learned positions, a stack of blocks and a last layer norm.

    Position p is the p-th newest event of its own sequence (0 is the newest), so neither the padding side nor cutting the oldest
    events moves it.
    """

    def __init__(self, config: TransformerConfig, dim: int, max_len: int, *, causal: bool) -> None:
        super().__init__()
        check_at_least(1, config.num_layers, "encoder.num_layers")
        check_heads(dim, config.num_heads)
        check_share(config.dropout, "encoder.dropout")
        check_at_least(1 / dim, config.ffn_factor, "encoder.ffn_factor")
        check_choice(config.activation, ACTIVATIONS, "encoder.activation")
        self.p, self.max_len = config.dropout, max_len
        self.positions = nn.Parameter(torch.empty(max_len, dim).normal_(std=0.02))
        self.blocks = nn.ModuleList(Block(config, dim, max_len, causal=causal, site=1 + 3 * i) for i in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, offsets: Tensor, keys: Tensor | None) -> Tensor:
        """Returns `[sum_L, D]` from `x` `[sum_L, D]`.

        Raises:
            ValueError: on the CPU, when a sequence is longer than max_len; on CUDA the look-up of its position stops the run.
        """
        if offsets.device.type == "cpu":
            _check_longest(offsets, self.max_len)
        x = x + self.positions.index_select(0, ragged.age(offsets, x.shape[0])).to(x.dtype)
        x = ragged.dropout(x, self.p if self.training else 0.0, keys, 0)
        for block in self.blocks:
            x = block(x, offsets, keys)
        return self.norm(x)  # type: ignore[no-any-return]


def _check_longest(offsets: Tensor, max_len: int) -> None:
    lengths = offsets.diff()
    if len(lengths) and int(lengths.max()) > max_len:
        raise problem(
            "A sequence is longer than the encoder has positions",
            got=f"length {int(lengths.max())}",
            wanted=f"at most {max_len}",
            where=f"sequence {int(lengths.argmax())} of the batch",
            todo="cut histories to data.max_len (the newest events), or train with a larger data.max_len",
        )


def transformer_cost(config: TransformerConfig, dim: int, *, causal: bool) -> tuple[float, float, float]:
    """Returns (a, b, c): multiply-adds of a position's linear layers are 1, those of scores and sums are b per pair of positions."""
    gates = 3 if config.activation == "swiglu" else 2
    linear = (4 + gates * config.ffn_factor) * dim * dim
    return 1.0, (dim if causal else 2 * dim) / linear, 0.0
