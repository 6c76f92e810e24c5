"""Saves and loads a run's state, tables, dense part and optimizers: whole or not at all, on any ranks and sharding.

A checkpoint is a folder with a manifest of its files. It is written under another name, on the disk with all its files before it is
renamed, and an older one is removed only after that: whenever a process is killed, `find_newest` finds a whole one.
"""

from __future__ import annotations

from distrag.checkpoint.files import write_whole
from distrag.checkpoint.find import Found, find_checkpoint, find_newest, newest_checkpoint, read_extra
from distrag.checkpoint.folders import exists as has_checkpoint
from distrag.checkpoint.folders import step_name
from distrag.checkpoint.load import load_checkpoint, match_checkpoint
from distrag.checkpoint.match import Match
from distrag.checkpoint.save import Checkpoints, save_checkpoint
from distrag.checkpoint.turns import take_turns

__all__ = [
    "Checkpoints",
    "Found",
    "Match",
    "find_checkpoint",
    "find_newest",
    "has_checkpoint",
    "load_checkpoint",
    "match_checkpoint",
    "newest_checkpoint",
    "read_extra",
    "save_checkpoint",
    "step_name",
    "take_turns",
    "write_whole",
]
