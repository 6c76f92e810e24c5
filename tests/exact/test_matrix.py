"""N ranks compute what a plain program on one computes: each encoder, each loss, each pair of sharding and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exact.cases import ENCODERS, FURTHER, LOSSES, STEPS, Case, build_store, matrix, thinned
from tests.exact.harness import LIMIT, Run, Wanted, compare, refusals, run_cases, run_references


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("exact") / "store")


@dataclass(frozen=True)
class Target:
    """What a case has to come to, and what it came to on one rank."""

    wanted: Wanted | None
    one: Run


@pytest.fixture(scope="module")
def targets(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Target]:
    cases = thinned()
    ones = run_cases(cases, 1, store, tmp_path_factory.mktemp("one"))
    return {case: Target(wanted, one) for case, wanted, (one,) in zip(cases, run_references(cases, store), ones, strict=True)}


def check(case: Case, target: Target, run: Run, where: str) -> None:
    apart = compare(run, target.wanted or target.one)
    assert apart.is_close, f"{case}, {where}: {apart}"
    assert case.eps != "large" or apart.over == 0, f"{case}, {where}: {apart}"
    assert run.samples == target.one.samples, f"{case}, {where}: the same samples form each step"


def test_one_rank_equals_the_plain_reference_and_moves_every_table_and_parameter(targets: dict[Case, Target]) -> None:
    for case, target in targets.items():
        check(case, target, target.one, "1 rank")
        assert target.wanted is None or target.wanted.moved > 100 * LIMIT, case


@pytest.mark.parametrize(("world", "cases"), [(2, FURTHER), (3, [case for case in thinned() if case not in FURTHER])])
def test_losses_dense_parameters_and_tables_of_every_rank_equal_the_plain_reference(
    world: int, cases: list[Case], targets: dict[Case, Target], store: Path, tmp_path: Path
) -> None:
    idle = 0
    for case, ranks in zip(cases, run_cases(cases, world, store, tmp_path), strict=True):
        idle += ranks[0].idle
        for rank, run in enumerate(ranks):
            check(case, targets[case], run, f"rank {rank} of {world}")
    assert idle > 10 or world == 2, "ranks without a sample"


@pytest.fixture(scope="module")
def answers(store: Path) -> dict[Case, list[str]]:
    """What each number of ranks says to each combination of an encoder that sees only the past, and of one that sees all."""
    return {case: refusals(case, store, (1, 2, 3, 4)) for case in matrix() if case.encoder in ("mean", "self_attention")}


def test_the_thinned_matrix_holds_every_encoder_loss_and_accepted_pair_of_sharding_and_optimizer(answers: dict[Case, list[str]]) -> None:
    cases = thinned()
    assert {case.encoder for case in cases} == set(ENCODERS)
    assert {case.loss for case in cases} == set(LOSSES)
    assert {case.step for case in cases} == set(STEPS)
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
