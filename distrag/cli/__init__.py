"""The command line: `distrag COMMAND ...`; `COMMANDS` in `words.py` names them.

Every command imports what it needs when it runs, so that `distrag --help` answers at once.
"""

from distrag.cli.entry import main, run

__all__ = ["main", "run"]
