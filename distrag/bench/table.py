"""The report of the bench as tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(_steps(report["steps"], "fused Adam" if report["padded_adam_fused"] else "Adam"), _loading(report["data_path"]))
    machine = report["machine"]
    words = [str(machine["cpu"]), f"{machine['torch_threads']} thread(s)"]
    words += [f"{name} {machine[name]}" for name in machine if name not in ("cpu", "torch_threads")]
    console.print(", ".join(words))
    console.print("Ratios of medians over interleaved rounds by CPU time; in parentheses the middle half of the rounds.", markup=False)


def _steps(cells: list[dict[str, Any]], adam: str) -> Table:
    table = _table("Training step, loading included: thousand valid tokens a CPU second", "encoder", "B")
    for title in ("distrag", adam, "row-wise", f"x {adam}", "asked", "x row-wise", "loading"):
        table.add_column(title, justify="right", no_wrap=True)
    for cell in cells:
        speeds = (cell["tokens_per_s"][name] for name in ("distrag", "padded_adam", "padded_rowwise"))
        asked = _asked(ASKED.get((cell["encoder"], cell["batch_size"])))
        ratios = (_ratio(cell["ratio_adam"]), asked, _ratio(cell["ratio_rowwise"]))
        share = f"{cell['data_path_share']['distrag']:.1%}"
        table.add_row(cell["encoder"], str(cell["batch_size"]), *(f"{speed / 1e3:,.1f}" for speed in speeds), *ratios, share)
    return table


def _loading(cells: list[dict[str, Any]]) -> Table:
    table = _table("Data path alone: microseconds a batch", "B")
    for title in ("distrag", "padded", "x", "asked"):
        table.add_column(title, justify="right", no_wrap=True)
    for cell in cells:
        times = (f"{cell['batch_us'][name]:,.0f}" for name in ("distrag", "padded"))
        table.add_row(str(cell["batch_size"]), *times, _ratio(cell["ratio"]), _asked(ASKED_LOADING.get(cell["batch_size"])))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="right" if column == "B" else "left")
    return table


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.1f} ({ratio['low']:.1f}-{ratio['high']:.1f})"


def _asked(value: int | None) -> str:
    return "" if value is None else f">= {value}"
