"""What stands between a bad number and the weights: the scale of the loss, and the count of steps that were skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROWTH_STEPS = 2000
"""Good steps in a row after which the scale of fp16 is doubled, as torch's GradScaler does."""


class Guard:
    """Admits finite steps. With fp16 the loss is scaled, so that small gradients do not vanish; a step that overflows halves the scale.

    Tables never see the scale: it is taken off at the boundary in front of them.

    Args:
        scale: first scale of the loss; 1 and `fixed` for float32 and bfloat16.
        fixed: the scale stays.

    Attributes:
        scale: what the loss is multiplied by now.
        good_steps: admitted in a row since the scale last changed.
        num_updates: admitted in all: the steps that the schedule and Adam have seen.
        num_skipped: skipped in all.
        skipped_in_row: skipped since the last one that was admitted.
    """

    def __init__(self, scale: float = 1.0, *, fixed: bool = True) -> None:
        self.scale, self.fixed = scale, fixed
        self.good_steps = self.num_updates = self.num_skipped = self.skipped_in_row = 0

    def admit(self, *, finite: bool) -> bool:
        """Returns whether a step may update; every rank must give the same answer to `finite`."""
        if finite:
            self.num_updates, self.skipped_in_row = self.num_updates + 1, 0
            self.good_steps += 1
            if not self.fixed and self.good_steps >= GROWTH_STEPS:
                self.scale, self.good_steps = min(self.scale * 2.0, 2.0**24), 0
            return True
        self.num_skipped, self.skipped_in_row, self.good_steps = self.num_skipped + 1, self.skipped_in_row + 1, 0
        if not self.fixed:
            self.scale = max(self.scale / 2.0, 2.0**-14)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns scale and counters: small and JSON-able."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; what it does not name stays, and so does a fixed scale."""
        for name in _STATE:
            if name in state and not (self.fixed and name == "scale"):
                setattr(self, name, state[name])


_STATE = ("scale", "good_steps", "num_updates", "num_skipped", "skipped_in_row")
