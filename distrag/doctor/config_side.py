"""A config's store, and the folder its run will write into."""

from __future__ import annotations

from collections.abc import Sequence

from distrag.doctor.ask import NoAnswer, ask
from distrag.doctor.line import Line

_LEAST = 2**20


def check_config(words: Sequence[str]) -> list[Line]:
    """Returns whether a config can be read, its store is whole, and its run can write what it will save.

    Args:
        words: as of `distrag train`.
    """
    try:
        told = ask("config", *words, limit_s=600.0)
    except NoAnswer as error:
        return [Line("config and store", "problem", *_parted(error, "mend the config, or make the store again with `distrag prepare`"))]
    lines = [Line("config and store", "ok", f"{told['samples']:,} samples; every byte fits the hash {told['hash'][:12]}")]
    return [*lines, _folder(told["run_dir"], told["state_bytes"], told["keep"])]


def _folder(run_dir: str, state_bytes: int, keep: int) -> Line:
    try:
        free = ask("folder", run_dir, str(max(state_bytes, _LEAST)))["free_bytes"]
    except NoAnswer as error:
        return Line("run folder", "problem", *_parted(error, "choose another --train.run_dir"))
    copies = keep + 2  # the best one, and the one that is being written
    told = f"{run_dir}: {free / 2**30:.2f} GiB free, a save takes {state_bytes / 2**30:.3f} GiB and {copies} are kept at once"
    if free < max(state_bytes, _LEAST):
        return Line("run folder", "problem", told, "free the disk, or choose another --train.run_dir")
    if free < copies * state_bytes:
        return Line("run folder", "warning", told, "free the disk, or lower train.keep")
    return Line("run folder", "ok", told)


def _parted(error: NoAnswer, todo: str) -> tuple[str, str]:
    """Returns what was found, and what to do: that of the message where it has one."""
    told, mark, own = str(error).partition("\n  to do:")
    return told, own.strip() if mark else todo
