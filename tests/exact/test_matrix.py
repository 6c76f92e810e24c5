"""N ranks compute what a plain program on one computes: each encoder, each loss, each pair of sharding and optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.exact.cases import ENCODERS, LOSSES, build_store, matrix, thinned
from tests.exact.harness import LIMIT, compare, refusal, run_cases, run_references

WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("exact") / "store")


def test_losses_dense_parameters_and_tables_of_every_rank_equal_the_plain_reference(store: Path, tmp_path: Path) -> None:
    cases = thinned()
    wanted = run_references(cases, store)
    runs = {world: run_cases(cases, world, store, tmp_path) for world in WORLDS}
    for i, case in enumerate(cases):
        target = wanted[i]
        assert target is None or target.moved > 100 * LIMIT, f"{case}: training has to move every table and parameter"
        for world, rank in [(world, rank) for world in WORLDS for rank in range(world)]:
            run = runs[world][i][rank]
            apart = compare(run, target or runs[1][i][0])
            assert apart.is_close, f"{case}, rank {rank} of {world}: {apart}"
            assert case.eps != "large" or apart.over == 0, f"{case}, rank {rank} of {world}: {apart}"
            assert run.samples == runs[1][i][0].samples, f"{case}: the same samples form each step on {world} ranks"
    assert sum(its[0].idle for its in runs[3]) > 100, "ranks without a sample"


def test_the_thinned_matrix_holds_every_encoder_loss_and_pair_of_sharding_and_optimizer(store: Path) -> None:
    accepted = {case for case in matrix() if not refusal(case, store, 2)}
    cases = thinned()
    assert {case.encoder for case in cases} == set(ENCODERS)
    assert {case.loss for case in cases} == set(LOSSES)
    assert {(c.sharding, c.optimizer) for c in cases} == {(c.sharding, c.optimizer) for c in accepted}


def test_what_cannot_be_exact_is_refused_at_start_for_any_number_of_ranks_with_reason_and_choice(store: Path) -> None:
    texts = {case: [refusal(case, store, world) for world in (1, 2, 3, 4)] for case in matrix()}
    refused = {case: its[0] for case, its in texts.items() if any(its)}
    assert all(len(set(its)) == 1 for its in texts.values()), "the answer does not depend on the number of ranks"
    assert (len(texts), len(refused)) == (384, 193)
    reasons = Counter(text.splitlines()[0] for text in refused.values())
    assert set(reasons) == {
        "An encoder that sees the future would read its own targets",
        "full_softmax needs the whole item table on each rank",
        "column_wise keeps one row-wise Adagrad state per shard, which is other mathematics than one process",
        "No such fused optimizer on this device",
        "A choice that does not exist",
    }, reasons
    for text in refused.values():
        assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["got", "wanted", "where", "to do"], text

