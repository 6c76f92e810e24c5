"""Where an encoder pads inside, and how much: most kernels walk ragged rows, some library calls want rectangles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from distrag import ragged

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

Padding = Literal["none", "groups", "rectangle", "unknown"]
"""`groups`: one rectangle for each group of similar lengths; `rectangle`: one for the whole batch of a rank."""

_ATTENTION, _POOLING, _RECURRENT = ("sasrec", "self_attention"), ("mean", "max", "sum"), ("gru",)


def inner_padding(name: str, settings: Any, dim: int, *, device: str, half: bool, mixed: bool, states: bool) -> Padding:
    """Returns how the encoder pads inside; `unknown` for one that is not listed here.

    Attention: the CPU kernel (float32) and CUDA's variable-length kernel (half precision, heads of a multiple of 8) do not pad, anything
    else groups similar lengths. Pooling pads only where it needs a state for each position and the CPU kernel does not run. The GRU
    walks packed sequences everywhere.

    Args:
        name: of the encoder.
        settings: its Config.
        dim: width of the model.
        device: `cpu` or `cuda`.
        half: the dense part runs in half precision.
        mixed: a linear layer joins the features first, so that in half precision the encoder is given half precision.
        states: a state for each position is wanted (next_item), not one vector a history.
    """
    if name in _ATTENTION:
        ragged_kernel = half and (dim // settings.num_heads) % 8 == 0 if device == "cuda" else not half
        return "none" if ragged_kernel else "groups"
    if name in _POOLING:
        ragged_kernel = device == "cpu" and not (half and mixed)
        return "none" if ragged_kernel or not states else "rectangle"
    return "none" if name in _RECURRENT else "unknown"


def count_cells(lengths: Ints, padding: Padding) -> int:
    """Returns the positions that are computed for a batch of these lengths, padding included.

    Args:
        lengths: of one rank's batch, `[B]`.
        padding: from `inner_padding`; `unknown` counts as none.
    """
    if padding == "rectangle":
        return len(lengths) * int(lengths.max(initial=0))
    if padding == "groups":
        sizes = torch.from_numpy(lengths)
        return sum(len(group) * int(sizes[group[-1]]) for group in ragged.length_groups(sizes))
    return int(lengths.sum())
