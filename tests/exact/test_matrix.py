"""N ranks compute what a plain program on one computes: each encoder, each loss, each pair of sharding and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.cases import ENCODERS, LOSSES, Case, build_store, matrix, thinned
from tests.exact.harness import LIMIT, compare, refusals, run_cases, run_references

WORLDS = (1, 2, 3)
RANKS = [(world, rank) for world in WORLDS for rank in range(world)]


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
        for world, rank in RANKS:
            run = runs[world][i][rank]
            apart = compare(run, target or runs[1][i][0])
            assert apart.is_close, f"{case}, rank {rank} of {world}: {apart}"
            assert case.eps != "large" or apart.over == 0, f"{case}, rank {rank} of {world}: {apart}"
            assert run.samples == runs[1][i][0].samples, f"{case}: the same samples form each step on {world} ranks"
    assert sum(its[0].idle for its in runs[3]) > 100, "ranks without a sample"


@pytest.fixture(scope="module")
def answers(store: Path) -> dict[Case, list[str]]:
    """What each number of ranks says to each combination of an encoder that sees only the past, and of one that sees all."""
    return {case: refusals(case, store, (1, 2, 3, 4)) for case in matrix() if case.encoder in ("mean", "self_attention")}


def test_the_thinned_matrix_holds_every_encoder_loss_and_accepted_pair_of_sharding_and_optimizer(answers: dict[Case, list[str]]) -> None:
    cases = thinned()
    assert {case.encoder for case in cases} == set(ENCODERS)
    assert {case.loss for case in cases} == set(LOSSES)
    accepted = {(case.sharding, case.optimizer) for case, texts in answers.items() if not any(texts)}
    assert {(case.sharding, case.optimizer) for case in cases} == accepted
    assert len(accepted) == 11


def test_what_cannot_be_exact_is_refused_at_start_with_reason_and_choice_whatever_the_number_of_ranks(
    answers: dict[Case, list[str]],
) -> None:
    assert all(len(set(texts)) == 1 for texts in answers.values())
    refused = {case: texts[0] for case, texts in answers.items() if any(texts)}
    assert (len(answers), len(refused)) == (128, 81)
    assert {text.splitlines()[0] for text in refused.values()} == {
        "An encoder that sees the future would read its own targets",
        "full_softmax needs the whole item table on each rank",
        "column_wise keeps one row-wise Adagrad state per shard, which is other mathematics than one process",
        "No such fused optimizer on this device",
        "A choice that does not exist",
    }
    for text in refused.values():
        assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["got", "wanted", "where", "to do"], text
