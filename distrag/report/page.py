"""Writes `report.html` of a run: curves as inline SVG, the final numbers, and what was avoided, cut and waited for."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from distrag.data.text_file import parse_json, read_small
from distrag.problem import problem
from distrag.report.curve import draw_curve

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1d2530; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #e3e7ec; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { color: #5a6675; font-size: .85rem; } svg { width: 100%; height: auto; }
pre { background: #f5f7f9; padding: 1rem; overflow-x: auto; font-size: .8rem; }
@media (prefers-color-scheme: dark) {
body { color: #d9dfe6; background: #14181d; } th, td { border-color: #2c343d; } pre { background: #1c2229; }
}
"""


def write_report(run_dir: str | Path) -> Path:
    """Returns the path of the page written into the run directory.

    Args:
        run_dir: folder that `distrag train` wrote.

    Raises:
        ValueError: no run there, or a line of its metrics cannot be read.
    """
    folder = Path(run_dir)
    if not os.path.isfile(folder / "metrics.jsonl"):
        todo = "give the folder that `distrag train` wrote as train.run_dir"
        raise problem("No run in this folder", got="no metrics.jsonl", wanted="a run directory", where=folder, todo=todo)
    lines, result = _read_lines(folder / "metrics.jsonl"), _read_result(folder / "result.json")
    config = _read_text(folder / "config.yaml")
    parts = [
        f"<h1>{html.escape(folder.name)}</h1>",
        _summary(lines, result),
        f"<h2>Curves</h2><div class=curves>{_curves(lines)}</div>",
        f"<h2>Metrics</h2>{_metrics(result)}",
        f"<h2>What it did</h2>{_deeds(lines, result)}",
        f"<h2>Config</h2><pre>{html.escape(config)}</pre>",
    ]
    page = folder / "report.html"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(folder.name)}</title><style>{_STYLE}</style>"
    try:
        page.write_text(head + "\n".join(parts) + "</html>\n", encoding="utf-8")
    except OSError as error:
        todo = "free or unlock the path, or copy the run to another folder"
        raise problem("The page cannot be written", got=error.strerror, wanted="a writable file", where=page, todo=todo) from None
    return page


_WRITTEN = "put the file back as the run wrote it"


def _read_text(path: Path) -> str:
    what, todo = "A file of the run", "give the folder of a whole run"
    return read_small(path, what=what, todo=todo).decode("utf-8", errors="replace")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    content = read_small(path, what="The metrics of the run", todo=_WRITTEN, most_bytes=1 << 40)
    for number, text in enumerate(content.splitlines(), 1):
        where = f"{path}, line {number}"
        todo = "drop the broken line (a killed run can leave half of one)"
        line = parse_json(text, where, what="A line of the metrics", todo=todo)
        if not (isinstance(line, dict) and isinstance(line.get("kind"), str) and _is_number(line.get("step"))):
            wanted = "an object with `kind` and `step`"
            raise problem("A line of the metrics is none", got=f"{line!r:.80}", wanted=wanted, where=where, todo=todo)
        lines.append(line)
    return lines


def _read_result(path: Path) -> dict[str, Any]:
    """Returns what the run came to; nothing where it is not finished."""
    if not os.path.lexists(path):
        return {}
    result = parse_json(read_small(path, what="The result of the run", todo=_WRITTEN), path, what="The result of the run", todo=_WRITTEN)
    wrong = [name for name, kind in _RESULT.items() if not isinstance(result, dict) or not isinstance(result.get(name), kind)]
    wrong += [name for name in ("num_cut", "num_samples") if name not in wrong and not all(_is_count(v) for v in result[name].values())]
    if wrong:
        got = f"{', '.join(wrong)} missing or wrong"
        raise problem("Not the result of a run", got=got, wanted="what the run wrote", where=path, todo=_WRITTEN)
    return dict(result)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_RESULT: dict[str, Any] = {
    **dict.fromkeys(("num_steps", "num_epochs", "world_size", "best_step"), int),
    **dict.fromkeys(("valid", "test", "num_cut", "num_samples"), dict),
    "seconds": (int, float),
    "device": str,
}


def _summary(lines: list[dict[str, Any]], result: dict[str, Any]) -> str:
    if not result:
        return f"<p>Not finished: {len(lines)} lines of metrics so far, and no result.json.</p>"
    text = (
        f"{result['num_steps']:,} steps in {result['num_epochs']} epochs on {result['world_size']} rank(s) ({result['device']}), "
        f"{result['seconds']:,.0f} s; best step {result['best_step']:,}."
    )
    return f"<p>{html.escape(text)}</p>"


def _curves(lines: list[dict[str, Any]]) -> str:
    train = [line for line in lines if line["kind"] == "train"]
    valid = [line for line in lines if line["kind"] == "valid"]
    wanted = [(train, name) for name in ("loss", "tokens_per_s", "imbalance", "grad_norm", "lr")]
    names = [key for key in (valid[0] if valid else {}) if key in ("auc", "log_loss") or key.startswith(("ndcg@10", "hr@10"))]
    wanted += [(valid, name) for name in names]
    drawn = []
    for rows, name in wanted:
        points = [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]
        if points:
            what = "train" if rows is train else "valid"
            drawn.append(f"<figure>{draw_curve(points)}<figcaption>{what} {html.escape(name)} by step</figcaption></figure>")
    return "".join(drawn)


def _metrics(result: dict[str, Any]) -> str:
    valid, test = result.get("valid", {}), result.get("test", {})
    rows = "".join(f"<tr><td>{html.escape(key)}<td class=n>{_number(valid.get(key))}<td class=n>{_number(test.get(key))}" for key in test)
    return f"<table><tr><th>metric<th>valid<th>test{rows}</table>"


def _deeds(lines: list[dict[str, Any]], result: dict[str, Any]) -> str:
    train = [line for line in lines if line["kind"] == "train"]
    mean = {
        key: _mean([line.get(key) for line in train])
        for key in ("padded_batch_padding_share", "imbalance", "data_wait_share", "tokens_per_s")
    }
    rows = {
        "padding that a padded batch would have had": _share(mean["padded_batch_padding_share"]),
        "imbalance of the ranks (max/mean cost)": _number(mean["imbalance"]),
        "time waited for data": _share(mean["data_wait_share"]),
        "tokens a second, all ranks": _number(mean["tokens_per_s"]),
        **{f"events cut by data.max_len, {part}": f"{count:,}" for part, count in result.get("num_cut", {}).items()},
        **{f"samples, {part}": f"{count:,}" for part, count in result.get("num_samples", {}).items()},
    }
    return "<table>" + "".join(f"<tr><td>{html.escape(name)}<td class=n>{value}" for name, value in rows.items()) + "</table>"


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if _is_number(value)]
    return sum(known) / len(known) if known else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: Any) -> str:
    if not _is_number(value):
        return "-" if value is None else html.escape(str(value))
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # NaN is below nothing
