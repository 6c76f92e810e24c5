"""Which cost a run balances by, and the small solver that fits one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrag.config import RunConfig, read_config
from distrag.training.cost import COST_FILE, FittedCost, choose_cost, cost_settings, keep_cost, read_cost, write_cost
from distrag.training.nnls import solve_nonnegative

ARITHMETIC = (1.0, 0.5, 0.0)


def config(**sections: Any) -> RunConfig:
    return read_config({"encoder": {"name": "gru"}, **sections})


def fitted(run: RunConfig, **more: Any) -> FittedCost:
    made = FittedCost((2e-6, 0.0, 1e-5), 0.01, cost_settings(run), "cpu", "a CPU", 1, 0.02, 0.05)
    return dataclasses.replace(made, **more)


def test_a_fitted_cost_comes_back_from_its_file(tmp_path: Path) -> None:
    made = fitted(config())
    assert write_cost(made, tmp_path / "new" / "run").name == COST_FILE
    assert read_cost(tmp_path / "new" / "run") == made
    assert read_cost(tmp_path) is None
    (tmp_path / "next").mkdir()
    keep_cost(tmp_path / "new" / "run", tmp_path / "next")
    keep_cost(tmp_path / "none", tmp_path / "next")
    assert read_cost(tmp_path / "next") == made


def test_the_config_comes_before_the_fit_and_the_fit_before_arithmetic() -> None:
    run = config()
    cost, words = choose_cost(run, ARITHMETIC, fitted(run), "cpu")
    assert cost == (2e-6, 0.0, 1e-5)
    assert words == "fitted on a CPU, error 2.0%"
    assert choose_cost(run, ARITHMETIC, None, "cpu") == (ARITHMETIC, "the encoder's arithmetic")
    assert choose_cost(run, ARITHMETIC, fitted(run), "auto")[0] == (2e-6, 0.0, 1e-5)
    mine = config(batching={"cost": [3.0, 0.0, 0.0]})
    assert choose_cost(mine, ARITHMETIC, fitted(mine), "cpu") == ((3.0, 0.0, 0.0), "batching.cost")


@pytest.mark.parametrize(
    ("change", "device", "words"),
    [
        ({"encoder": {"name": "gru", "num_layers": 2}}, "cpu", "another model"),
        ({"model": {"dim": 32}}, "cpu", "another model"),
        ({"loss": {"num_negatives": 9}}, "cpu", "another model"),
        ({"train": {"precision": "bf16"}}, "cpu", "another model"),
        ({}, "cuda", "fitted on cpu"),
    ],
)
def test_a_cost_of_another_model_or_device_is_not_taken(change: dict[str, Any], device: str, words: str) -> None:
    cost, said = choose_cost(config(**change), ARITHMETIC, fitted(config()), device)
    assert cost == ARITHMETIC
    assert words in said


def test_a_cost_holds_for_other_budgets_seeds_and_folders() -> None:
    other = config(batching={"max_tokens": 999}, train={"seed": 3, "run_dir": "elsewhere/run"}, data={"path": "elsewhere/store"})
    assert choose_cost(other, ARITHMETIC, fitted(config()), "cpu")[0] == (2e-6, 0.0, 1e-5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cost": [1, 2]}', "no json", '{"cost": [0, 0, 0]}', '{"cost": [1, NaN, 0]}'])
def test_a_file_that_is_no_cost_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / COST_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"(?s)fitted cost cannot be read.*cost\.json.*to do"):
        read_cost(tmp_path)


@pytest.mark.parametrize("values", [[0, 0, 0], [1, -1, 0], [1, float("nan"), 0], [1, 2], [float("inf"), 0, 0]])
def test_numbers_that_are_no_cost_are_refused(tmp_path: Path, values: list[float]) -> None:
    write_cost(fitted(config(), cost=tuple(values)), tmp_path)
    with pytest.raises(ValueError, match="fitted cost cannot be read"):
        read_cost(tmp_path)


def test_the_solver_meets_the_conditions_of_the_optimum() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        n, k = int(random.integers(1, 12)), int(random.integers(1, 5))
        matrix = random.normal(size=(n, k)) * 10.0 ** random.integers(-6, 6, k)
        values = random.normal(size=n)
        x = solve_nonnegative(matrix, values)
        scale = np.linalg.norm(matrix, axis=0)
        slope = matrix.T @ (matrix @ x - values) / scale
        assert x.min() >= 0
        assert slope.min() > -1e-7
        assert np.abs(slope[x > 0]).max(initial=0) < 1e-7


def test_the_solver_finds_what_is_there_and_takes_columns_of_zeros() -> None:
    matrix = np.random.default_rng(1).random((9, 3)) * [1e3, 1e6, 1.0]
    assert solve_nonnegative(matrix, matrix @ [2.0, 0.0, 0.5]) == pytest.approx([2.0, 0.0, 0.5])
    assert solve_nonnegative(np.zeros((3, 2)), np.ones(3)).tolist() == [0.0, 0.0]
