"""What the commands share of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

COMMANDS = {
    "prepare": "files of histories or events -> a store",
    "stats": "lengths, padding, cuts and vocabularies of a store",
    "plan": "the steps, balance and placement of a config, without training",
    "verify": "whether a config trains the same on several numbers of ranks",
    "train": "a config -> a trained, evaluated model in a run directory",
    "evaluate": "the metrics of a run, or of ranking by popularity",
    "bench": "this machine -> ratios against the padded way of working; how even and how quick plans are",
    "export": "a run -> one file of weights that plain modules load",
    "report": "a run directory -> one page",
    "submit": "a config -> a job on this machine, Slurm or Kubernetes, checked and planned first",
    "jobs": "status, logs and end of submitted jobs",
    "doctor": "whether this machine, its packages and a config's store can train",
}


def full_words(words: Sequence[str]) -> list[str]:
    """Returns the words with a bare `--debug` or `--resume` as the config's parser wants it, which asks every key for a value."""
    followed = [word == "--debug" and after in ("true", "false") for word, after in zip(words, [*words[1:], ""], strict=False)]
    bare = {"--debug": "--debug=true", "--resume": "--train.resume=true"}
    return [word if has_value else bare.get(word, word) for word, has_value in zip(words, followed, strict=True)]


def asks_debug(words: Sequence[str]) -> bool:
    """Returns whether the words ask for debug mode."""
    return any(word in ("--debug", "--debug=true") for word in words)


def command_parser(name: str, what: str = "") -> argparse.ArgumentParser:
    """Returns an empty parser of a command.

    Args:
        name: the command.
        what: what it does; otherwise as `COMMANDS` says.
    """
    return argparse.ArgumentParser(prog=f"distrag {name}", description=what or COMMANDS[name], allow_abbrev=False)
