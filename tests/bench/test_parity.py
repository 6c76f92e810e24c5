"""The padded baseline is distrag's own model: same histories, same weights, same logits, same learning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distrag.bench.histories import BenchData, draw_histories, read_histories
from distrag.bench.padded import PADDED_ENCODERS, PaddedModel, PaddedSide, RowWiseAdagrad, Samples, build_loader
from distrag.bench.parity import check_histories, check_model, copy_weights, logit_difference
from distrag.bench.ragged import RaggedSide, bench_config, build_batches, write_histories
from distrag.bench.shape import ModelShape
from distrag.world import World, end_world, start_world

SHAPE = ModelShape(dim=16, max_len=30, num_layers=2)


@pytest.fixture(scope="module")
def world():
    made = start_world("cpu")
    yield made
    end_world(made)


def some_histories() -> BenchData:
    """Histories from 0 to 30 events, unknown items among them."""
    random = np.random.default_rng(4)
    lengths = np.concatenate([[0, 30, 1, 0], random.integers(0, 30, 28)])
    offsets = np.concatenate([[0], lengths.cumsum()])
    return BenchData(random.integers(0, 40, offsets[-1]), offsets, random.integers(0, 2, 32).astype(np.float32), 40, "test")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("encoder", sorted(PADDED_ENCODERS))
def test_both_sides_hold_the_same_weights_and_give_the_same_logits(tmp_path: Path, world: World, encoder: str, activation: str) -> None:
    data, shape = some_histories(), ModelShape(dim=16, max_len=30, num_layers=2, activation=activation)
    write_histories(data, tmp_path / "store")
    ragged = RaggedSide(bench_config(tmp_path / "store", encoder, 8, shape), world)
    with torch.no_grad():  # far from the small start, so that a difference would show
        for parameter in ragged.job.parallel.dense.values():
            parameter.add_(0.3 * torch.randn_like(parameter))
        ragged.job.parallel.item_shards("item")[0][2].mul_(50)
    loader = build_loader(Samples(data), ragged.loader.sampler.plan, left=PADDED_ENCODERS[encoder].left)
    check_histories(ragged.loader, loader)
    assert check_model(ragged, PaddedModel(encoder, data.num_rows, shape, sparse=False), loader) < 2e-5


@pytest.mark.parametrize("encoder", sorted(PADDED_ENCODERS))
def test_both_sides_learn_the_same_with_row_wise_adagrad(tmp_path: Path, world: World, encoder: str) -> None:
    data = draw_histories(64, 40, max_len=30)  # no unknown item: distrag trains row 0, padding does not
    write_histories(data, tmp_path / "store")
    ragged = RaggedSide(bench_config(tmp_path / "store", encoder, 8, SHAPE), world)
    loader = build_loader(Samples(data), ragged.loader.sampler.plan, left=PADDED_ENCODERS[encoder].left)
    model = PaddedModel(encoder, data.num_rows, SHAPE, sparse=True)
    copy_weights(ragged, model)
    optim = ragged.job.config.optim
    padded = PaddedSide(model, loader, optim.lr, optim.table_lr)
    for _ in range(6):
        assert ragged.step() == padded.step()
    trained = PaddedModel(encoder, data.num_rows, SHAPE, sparse=True)
    copy_weights(ragged, trained)
    torch.testing.assert_close(trained.items.weight, model.items.weight, rtol=0, atol=1e-4)
    # Single weights may part by a rate, for Adam divides what is almost zero by its own size; the logits show that all learnt the same.
    assert logit_difference(ragged, model, loader) < 1e-4


def test_other_histories_are_noticed(tmp_path: Path, world: World) -> None:
    data = some_histories()
    write_histories(data, tmp_path / "store")
    ragged = RaggedSide(bench_config(tmp_path / "store", "mean", 8, SHAPE), world)
    other = BenchData(data.items[::-1].copy(), data.offsets, data.labels, data.num_rows, "reversed")
    with pytest.raises(AssertionError, match="other histories in step 0"):
        check_histories(build_batches(ragged.job), build_loader(Samples(other), ragged.loader.sampler.plan))


def test_row_wise_adagrad_sums_what_a_row_got_before_it_squares() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    optimizer = RowWiseAdagrad(embedding.weight, lr=1.0, eps=0.0)
    (embedding(torch.tensor([1, 1, 3])) * torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).sum().backward()
    optimizer.step()
    assert embedding.weight.tolist() == [[0, 0], pytest.approx([-(2**0.5), 0]), [0, 0], pytest.approx([0, -(2**0.5)])]
    assert optimizer.state.tolist() == [0, 4.5, 0, 0.5]
    assert embedding.weight.grad is None


def test_drawn_histories_are_long_tailed_and_those_of_a_store_are_its_newest_events(tmp_path: Path) -> None:
    data = draw_histories(20_000, 1_000)
    assert np.quantile(data.lengths, [0.5, 0.95]) == pytest.approx([15, 120], rel=0.05)
    assert (data.lengths.min(), data.lengths.max()) == (1, 200)
    counts = np.sort(np.bincount(data.items, minlength=1_001)[1:])
    assert (data.items.min(), data.items.max()) == (1, 1_000)
    assert counts[-100:].sum() > 3 * counts[:500].sum()
    write_histories(some_histories(), tmp_path / "store")
    read = read_histories(tmp_path / "store", 3, max_len=4)
    assert read.lengths.tolist() == [0, 4, 1]
    assert read.items.tolist() == some_histories().items[26:31].tolist()
    assert read.labels.tolist() == some_histories().labels[:3].tolist()
    assert read.num_rows == 40
