"""Refusals of encoder options that cannot work, as five-part errors."""

from __future__ import annotations

from distrag.problem import problem


def check_at_least(least: float, got: float, key: str) -> None:
    """Refuses an option below `least`.

    Raises:
        ValueError: naming the config key.
    """
    if not got >= least:
        todo = f"set {key} to {least} or more"
        raise problem("An encoder option is too small", got=got, wanted=f"at least {least}", where=key, todo=todo)


def check_share(got: float, key: str) -> None:
    """Refuses a share that is not in [0, 1).

    Raises:
        ValueError: naming the config key.
    """
    if not 0.0 <= got < 1.0:
        raise problem("A dropout share is out of range", got=got, wanted="0 <= share < 1", where=key, todo=f"set {key} below 1")


def check_choice(got: str, choices: tuple[str, ...], key: str) -> None:
    """Refuses a word that is not one of `choices`.

    Raises:
        ValueError: naming the config key.
    """
    if got not in choices:
        raise problem("An encoder option is not known", got=got, wanted=" | ".join(choices), where=key, todo=f"choose one for {key}")


def check_heads(dim: int, num_heads: int) -> None:
    """Refuses a number of heads that does not divide the width.

    Raises:
        ValueError: naming both config keys.
    """
    check_at_least(1, num_heads, "encoder.num_heads")
    if dim % num_heads:
        raise problem(
            "The width cannot be shared among the heads",
            got=f"model.dim {dim}, encoder.num_heads {num_heads}",
            wanted="a width that num_heads divides",
            where="encoder.num_heads",
            todo=f"choose one of {[h for h in range(1, dim + 1) if dim % h == 0]} heads, or another model.dim",
        )
