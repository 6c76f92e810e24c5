"""How many machines a job takes, and how many ranks on each."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = re.compile(r"(?:(?:(?P<least>\d+):)?(?P<nodes>\d+)x)?(?P<ranks>\d+)")


@dataclass(frozen=True)
class Size:
    """How many machines a job takes, and how many ranks on each.

    Attributes:
        nodes: machines, at most.
        ranks: ranks of each of them.
        least: machines that it goes on with; as many as `nodes` unless the job is elastic.
    """

    nodes: int
    ranks: int
    least: int

    @property
    def world_size(self) -> int:
        """Ranks in all, when every machine is there."""
        return self.nodes * self.ranks

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on with fewer machines."""
        return self.least < self.nodes

    def __str__(self) -> str:
        return f"{f'{self.least}:' if self.is_elastic else ''}{self.nodes}x{self.ranks}"


def parse_size(text: str) -> Size:
    """Returns the size that a text such as `2`, `1x2` or `1:2x4` means.

    Args:
        text: ranks of one machine; or machines, `x`, ranks of each; or least machines, `:`, most machines, `x`, ranks of each.

    Raises:
        ValueError: another text, in one line.
    """
    found = _SIZE.fullmatch(text.strip())
    size = None
    if found:
        nodes = int(found["nodes"] or 1)
        size = Size(nodes, int(found["ranks"]), int(found["least"] or nodes))
    if size is None or min(size.ranks, size.least) < 1 or size.least > size.nodes:
        wanted = "RANKS, NODESxRANKS or LEAST:MOSTxRANKS with numbers above 0, such as 2, 1x2 or 1:2x4"
        raise ValueError(f"the job size {text!r} (-j) cannot be: give {wanted}")
    return size
