"""Tables on the terminal, and the report of the training steps as such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrag.bench.machine import machine_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

# What distrag asks of itself on its standard histories (median 15, p95 120, D = 64, 50,000 items), against Adam over everything.
ASKED = {
    ("gru", 32): 5,
    ("gru", 256): 8,
    ("self_attention", 32): 5,
    ("self_attention", 256): 8,
    ("mean", 32): 10,
    ("mean", 256): 10,
}
ASKED_LOADING = {32: 20, 256: 40}


def print_report(report: dict[str, Any]) -> None:
    """Prints the steps, the data path and the machine of a report."""
    console = open_console()
    console.print(_steps(report["steps"], "fused Adam" if report["padded_adam_fused"] else "Adam"), _loading(report["data_path"]))
    console.print(machine_line(report["machine"]))
    console.print("Ratios of medians over interleaved rounds by CPU time; in parentheses the middle half of the rounds.", markup=False)


def _steps(cells: list[dict[str, Any]], adam: str) -> Table:
    numbers = ("B", "distrag", adam, "row-wise", f"x {adam}", "asked", "x row-wise", "loading")
    table = build_table("Training step, loading included: thousand valid tokens a CPU second", ["encoder"], numbers)
    for cell in cells:
        speeds = (cell["tokens_per_s"][name] for name in ("distrag", "padded_adam", "padded_rowwise"))
        asked = _asked(ASKED.get((cell["encoder"], cell["batch_size"])))
        ratios = (_ratio(cell["ratio_adam"]), asked, _ratio(cell["ratio_rowwise"]))
        share = f"{cell['data_path_share']['distrag']:.1%}"
        table.add_row(cell["encoder"], str(cell["batch_size"]), *(f"{speed / 1e3:,.1f}" for speed in speeds), *ratios, share)
    return table


def _loading(cells: list[dict[str, Any]]) -> Table:
    table = build_table("Data path alone: microseconds a batch", [], ("B", "distrag", "padded", "x", "asked"))
    for cell in cells:
        times = (f"{cell['batch_us'][name]:,.0f}" for name in ("distrag", "padded"))
        table.add_row(str(cell["batch_size"]), *times, _ratio(cell["ratio"]), _asked(ASKED_LOADING.get(cell["batch_size"])))
    return table


def build_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns an empty table.

    Args:
        title: what it shows.
        words: titles of the columns on the left.
        numbers: titles of the columns on the right, set flush right.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def open_console(width: int = 110) -> Console:
    """Returns the terminal, or where there is none one of a fixed width, so that a file gets whole lines.

    Args:
        width: characters of a line in a file.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.1f} ({ratio['low']:.1f}-{ratio['high']:.1f})"


def _asked(value: int | None) -> str:
    return "" if value is None else f">= {value}"
