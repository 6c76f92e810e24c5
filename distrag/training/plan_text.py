"""The numbers of a plan as lines to read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {
    "padded_batch_padding_share": "padded batch",
    "encoder_padding_share_cpu": "inside, CPU",
    "encoder_padding_share_cuda": "inside, CUDA",
}


def describe_plan(numbers: Mapping[str, Any], width: int | None = None) -> str:
    """Returns the numbers of `plan_run` as lines to read.

    Args:
        numbers: from `plan_run`.
        width: columns of the screen; otherwise those of the terminal.
    """
    columns = width or shutil.get_terminal_size((120, 24)).columns
    parts = (_steps, _balance, _padding, _memory, _traffic, _tables, _features)
    lines = [line for part in parts for line in part(numbers)]
    return "\n".join([*lines, *_histogram(numbers["length_histogram"], columns)])


def _steps(n: Mapping[str, Any]) -> list[str]:
    samples, tokens = f"{n['num_samples']:,} samples", f"{n['num_tokens']:,} tokens"
    looked = f"; {n['steps_looked_at']:,} of them looked at" if n["steps_looked_at"] < n["num_steps"] else ""
    return [
        f"{n['world_size']:,} rank(s), epoch {n['epoch']}: {samples}, {tokens}, {n['num_cut']:,} cut off",
        f"steps an epoch            {n['num_steps']:,}{looked}; {n['num_steps_of_run']:,} in the run",
    ]


def _balance(n: Mapping[str, Any]) -> list[str]:
    a, b, c = n["cost"]
    dummies = f"; {n['dummy_share']:.1%} of the ranks without a sample" if n["dummy_share"] else ""
    return [
        f"cost of a history         {a:.4g} L + {b:.4g} L^2 + {c:.4g} ({n['cost_from']})",
        "a rank and step           min / mean / max",
        f"  tokens                  {n['rank_tokens_min']:,} / {n['rank_tokens_mean']:,.1f} / {n['rank_tokens_max']:,}",
        f"  samples                 {n['rank_samples_min']:,} / {n['rank_samples_mean']:,.1f} / {n['rank_samples_max']:,}{dummies}",
        "max over mean of ranks    mean / p99 / max",
        f"  cost                    {n['imbalance_mean']:.4f} / {n['imbalance_p99']:.4f} / {n['imbalance_max']:.4f}",
        f"  tokens                  {n['token_imbalance_mean']:.4f} / {n['token_imbalance_p99']:.4f}",
    ]


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1%}"


def _padding(n: Mapping[str, Any]) -> list[str]:
    rows = [["bucket_steps", *_NAMES.values(), "entropy"]]
    for row in n["buckets"]:
        rows.append([str(row["bucket_steps"]), *(_share(row[name]) for name in _NAMES), f"{row['entropy']:.2f}"])
    shares = ", ".join(f"{words} {_share(n[name])}" for name, words in _NAMES.items())
    advice = [f"  on {device}: bucket_steps {it['bucket_steps']}: {it['why']}" for device, it in n["bucket_steps_advice"].items()]
    return [f"padding                   {shares}", *(f"  {line}" for line in _columns(rows)), *advice]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _memory(n: Mapping[str, Any]) -> list[str]:
    m = n["memory_per_rank"]
    kinds = ("tables", "dense", "activation", "exchange", "batch")
    each = ", ".join(f"{kind} {_size(m[f'{kind}_bytes'])}" for kind in kinds)
    per = f"{m['activation_bytes_per_token']:,.0f} bytes a token, {m['activation_bytes_per_sample']:,.0f} a sample"
    return [
        f"memory of the fullest     {_size(m['total_bytes'])}, interpreter and libraries beside: {each}",
        f"  activations             {per}",
    ]


def _traffic(n: Mapping[str, Any]) -> list[str]:
    t = n["sent_per_rank_and_step"]
    each = ", ".join(f"{kind} {_size(t[f'{kind}_bytes'])}" for kind in ("ids", "vectors", "gradients", "reduced"))
    most = f"; {_size(t['total_bytes_max'])} by the rank that sends most" if t["total_bytes_max"] > 1.01 * t["total_bytes_mean"] else ""
    return [f"sent by a rank and step   {_size(t['total_bytes_mean'])}: {each}{most}"]


def _tables(n: Mapping[str, Any]) -> list[str]:
    answer = n["torchrec"]
    proposals = [
        f"  {it['table']}: {it['sharding']} on {len(it['ranks']):,} ranks"
        if len(it["ranks"]) > 1
        else f"  {it['table']}: {it['sharding']} on rank {it['ranks'][0]}"
        for it in answer["tables"]
    ]
    head = f"TorchRec's planner would, after {answer['seconds']:.1f} s of thought" if proposals else f"TorchRec's planner: {answer['note']}"
    return ["tables", *(f"  {line}" for line in n["tables"]), head, *proposals]


def _features(n: Mapping[str, Any]) -> list[str]:
    return [f"{key.replace('_', ' '):25} {', '.join(n[key]) or 'none'}" for key in ("features_read", "features_left_out")]


def _histogram(classes: Sequence[Mapping[str, int]], width: int) -> list[str]:
    names = [f"{it['from']:,}" if it["from"] == it["to"] else f"{it['from']:,}-{it['to']:,}" for it in classes]
    counts = [f"{it['samples']:,}" for it in classes]
    left, right = max(map(len, names), default=0), max(map(len, counts), default=0)
    room, most = max(8, width - left - right - 6), max((it["samples"] for it in classes), default=0)
    bars = ["#" * -(-it["samples"] * room // max(1, most)) for it in classes]
    return ["samples by length", *(f"  {a:>{left}}  {b:>{right}}  {bar}" for a, b, bar in zip(names, counts, bars, strict=True))]


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"
