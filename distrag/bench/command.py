"""`distrag bench`: both sides on this machine, one table, one JSON file."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distrag.bench.arguments import count, real, report_file
from distrag.bench.histories import BenchData, draw_histories, read_histories
from distrag.bench.machine import describe_machine
from distrag.bench.padded import PADDED_ENCODERS, PaddedLoading, PaddedModel, PaddedSide, Samples, build_loader
from distrag.bench.parity import check_histories, check_model
from distrag.bench.ragged import RaggedLoading, RaggedSide, bench_config, build_batches, write_histories
from distrag.bench.shape import ModelShape
from distrag.bench.table import print_report
from distrag.bench.timing import Lap, compare, run_rounds, step_s, tokens_per_s
from distrag.world import World, open_world

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

Report = dict[str, Any]


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> Report:
    """Measures what the words ask for, prints the table, writes the JSON file and returns what is in it.

    Args:
        parser: without arguments yet.
        words: the command line after `distrag bench`.
    """
    _add_arguments(parser)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    if args.data:
        data = read_histories(args.data, args.samples, args.max_len)
    else:
        data = draw_histories(args.samples, args.num_items, args.max_len)
    with open_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        report = _measure(args, data, Path(folder) / "store", world)
    print_report(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = ModelShape()
    parser.add_argument("--data", help="a store whose histories are used; otherwise lognormal ones are drawn")
    parser.add_argument("--encoders", nargs="+", choices=tuple(PADDED_ENCODERS), default=list(PADDED_ENCODERS))
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=[32, 256], help="samples a step")
    parser.add_argument("--rounds", type=count, default=7, help="laps of each side; the medians count")
    parser.add_argument("--seconds", type=real(0.0), default=0.5, help="least length of a lap")
    parser.add_argument("--samples", type=count, default=1_000_000, help="histories")
    parser.add_argument("--num-items", type=count, default=50_000, help="items of drawn histories")
    parser.add_argument("--dim", type=count, default=shape.dim, help="width of the model")
    parser.add_argument("--max-len", type=count, default=shape.max_len, help="longest history")
    parser.add_argument("--num-layers", type=count, default=shape.num_layers, help="layers of gru and self_attention")
    parser.add_argument("--num-heads", type=count, default=shape.num_heads, help="heads of self_attention")
    parser.add_argument("--dropout", type=real(0.0, 1.0), default=shape.dropout, help="of self_attention, on both sides")
    parser.add_argument("--fused-adam", action="store_true", help="give the padded side torch's fused Adam, as distrag has")
    parser.add_argument("--threads", type=count, default=1, help="threads of torch")
    parser.add_argument("--json", type=report_file, help="file for everything measured")


def _measure(args: argparse.Namespace, data: BenchData, store: Path, world: World) -> Report:
    shape = ModelShape(args.dim, args.max_len, args.num_layers, args.num_heads, args.dropout)
    write_histories(data, store)
    samples = Samples(data)
    gc.collect()
    gc.freeze()  # a million lists would be walked by every full collection, on both sides' time
    try:
        cells = [_Cell(store, data, samples, size, shape, world, args) for size in args.batch_sizes]
        paths = [cell.measure_loading() for cell in cells]
        steps = [cell.measure_steps(encoder, path) for encoder in args.encoders for cell, path in zip(cells, paths, strict=True)]
    finally:
        gc.unfreeze()
    return {
        "machine": describe_machine(args.threads),
        "histories": _describe(data),
        "shape": asdict(shape),
        "padded_adam_fused": args.fused_adam,
        "steps": steps,
        "data_path": paths,
    }


class _Cell:
    """One batch size: builds the sides and measures them."""

    def __init__(
        self, store: Path, data: BenchData, samples: Samples, batch_size: int, shape: ModelShape, world: World, args: argparse.Namespace
    ) -> None:
        self.store, self.data, self.samples, self.batch_size = store, data, samples, batch_size
        self.shape, self.world, self.rounds, self.seconds = shape, world, args.rounds, args.seconds
        self.fused_adam = args.fused_adam

    def _ragged(self, encoder: str) -> RaggedSide:
        return RaggedSide(bench_config(self.store, encoder, self.batch_size, self.shape), self.world)

    def measure_loading(self) -> Report:
        """Returns the data path alone: distrag's plan, gather and collate against the DataLoader."""
        job = self._ragged("mean").job
        ragged = build_batches(job)
        padded = build_loader(self.samples, ragged.sampler.plan)
        check_histories(build_batches(job), padded)
        laps = run_rounds({"distrag": RaggedLoading(ragged), "padded": PaddedLoading(padded)}, self.rounds, self.seconds)
        return {
            "batch_size": self.batch_size,
            "batch_us": {name: 1e6 * step_s(its) for name, its in laps.items()},
            "tokens_per_s": {name: tokens_per_s(its) for name, its in laps.items()},
            "ratio": asdict(compare(laps["distrag"], laps["padded"])),
        }

    def measure_steps(self, encoder: str, path: Report) -> Report:
        """Returns whole training steps of one encoder, loading included."""
        ragged = self._ragged(encoder)
        left = PADDED_ENCODERS[encoder].left
        loader = build_loader(self.samples, ragged.loader.sampler.plan, left=left)
        check_histories(ragged.loader, loader)
        sides: dict[str, Any] = {"distrag": ragged}
        optim, tables = ragged.job.config.optim.lr, ragged.job.config.optim.table_lr
        difference = 0.0
        for name, sparse in (("padded_adam", False), ("padded_rowwise", True)):
            model = PaddedModel(encoder, self.data.num_rows, self.shape, sparse=sparse)
            difference = max(difference, check_model(ragged, model, loader))
            sides[name] = PaddedSide(model, loader, optim, tables, fused=self.fused_adam)
        laps = run_rounds(sides, self.rounds, self.seconds)
        return {
            "encoder": encoder,
            "batch_size": self.batch_size,
            "num_parameters": ragged.count_parameters(),
            "logit_difference": difference,
            **_numbers(laps),
            "data_path_share": {
                "distrag": path["batch_us"]["distrag"] / (1e6 * step_s(laps["distrag"])),
                "padded_adam": path["batch_us"]["padded"] / (1e6 * step_s(laps["padded_adam"])),
            },
        }


def _numbers(laps: dict[str, list[Lap]]) -> Report:
    return {
        "step_ms": {name: 1e3 * step_s(its) for name, its in laps.items()},
        "tokens_per_s": {name: tokens_per_s(its) for name, its in laps.items()},
        "ratio_adam": asdict(compare(laps["distrag"], laps["padded_adam"])),
        "ratio_rowwise": asdict(compare(laps["distrag"], laps["padded_rowwise"])),
        "laps": {name: [asdict(lap) for lap in its] for name, its in laps.items()},
    }


def _describe(data: BenchData) -> Report:
    quantiles = np.quantile(data.lengths, [0.5, 0.95, 1.0]).tolist()
    return {
        "source": data.source,
        "num_samples": len(data.labels),
        "num_positions": len(data.items),
        "num_rows": data.num_rows,
        "length_p50_p95_max": quantiles,
    }
