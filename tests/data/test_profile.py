"""The profile says what padding wastes and what cutting costs, in shares that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distrag.data.profile import length_profile, stats, store_stats
from distrag.data.store import Store
from distrag.data.write import write_store


def of_lengths(path: Path, lengths: list[int]) -> Store:
    return write_store(
        path, history={"item_id": np.ones(sum(lengths), np.int64)}, offsets=np.cumsum([0, *lengths]), label=np.zeros(len(lengths))
    )


def test_padding_and_cuts_are_counted_exactly(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", [0, 2, 4, 10]), max_lens=(4, 20))
    assert (profile.num_samples, profile.num_positions, profile.mean, profile.share_empty) == (4, 16, 4.0, 0.25)
    assert profile.quantiles["max"] == 10
    assert profile.padded_waste["max"] == pytest.approx(1 - 16 / 40)
    assert profile.padded_waste["p95"] == pytest.approx(1 - (0 + 2 + 4 + 9) / 36)
    assert [(c.max_len, c.share_positions, c.share_samples) for c in profile.cuts] == [(4, 6 / 16, 0.25), (20, 0.0, 0.0)]


def test_quantiles_reach_into_the_tail(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", [1] * 1995 + [500] * 4 + [1000]))
    assert (profile.quantiles["p50"], profile.quantiles["p99"], profile.quantiles["p99.9"], profile.quantiles["max"]) == (1, 1, 500, 1000)


def test_suggestions_can_be_used_as_they_are(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", list(range(1, 201))))
    advice = profile.suggestion
    assert advice.max_len % 8 == 0
    assert 198 <= advice.max_len <= 208
    assert advice.buckets[-1] == advice.max_len
    assert list(advice.buckets) == sorted(set(advice.buckets))
    assert advice.max_tokens >= 4 * advice.max_len


def test_what_each_policy_keeps_is_counted_at_the_suggested_max_len(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", [1] * 1995 + [20] * 5))  # suggested: 8
    fixed = {p.truncate: (p.num_kept, p.num_cut, p.share_cut, p.linear_share, p.quadratic_share, p.tau) for p in profile.policies[:3]}
    assert profile.suggestion.max_len == 8
    assert fixed == dict.fromkeys(("newest", "oldest", "random_window"), (2035, 60, pytest.approx(60 / 2095), 1, 1, None))
    linear, quadratic = profile.policies[3:]
    assert (linear.truncate, linear.cost, quadratic.cost) == ("stochastic", "L", "L^2")
    assert linear.tau == 0, "half cannot be reached where nearly all histories hold one event: the lowest is shown"
    assert (linear.num_kept, linear.linear_share) == (2000, pytest.approx(2000 / 2035))
    assert [p.draws for p in profile.policies] == [False, False, True, True, True]


def test_stochastic_halves_the_cost_in_the_profile(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", list(range(201))))
    linear, quadratic = profile.policies[3:]
    assert (linear.linear_share, quadratic.quadratic_share) == (pytest.approx(0.5), pytest.approx(0.5))
    assert linear.quadratic_share < 0.5 < quadratic.linear_share
    for policy in profile.policies:
        assert policy.num_kept + policy.num_cut == pytest.approx(profile.num_positions)
        assert policy.num_kept == pytest.approx(policy.linear_share * profile.policies[0].num_kept)


def test_a_store_without_positions_has_a_profile(tmp_path: Path) -> None:
    profile = length_profile(of_lengths(tmp_path / "s", [0, 0]))
    assert profile.share_empty == 1
    assert profile.padded_waste == {"p95": 0.0, "p99": 0.0, "max": 0.0}
    assert profile.cuts[0].share_positions == 0
    assert {(p.num_kept, p.num_cut, p.linear_share, p.tau) for p in profile.policies} == {(0, 0, 1, None)}


def test_known_lengths_of_real_data(shared_data: Path, tmp_path: Path) -> None:
    from distrag.data.prepare import prepare
    from distrag.data.store import open_store

    prepare(shared_data / "ml-100k.parquet", tmp_path / "out")
    quantiles = length_profile(open_store(tmp_path / "out")).quantiles
    assert [quantiles[name] for name in ("p50", "p95", "p99", "max")] == [65, 311, 443, 737]


def test_stats_are_printed_as_tables_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = of_lengths(tmp_path / "s", [0, 2, 4])
    stats(store.path)
    told = capsys.readouterr().out
    for word in ("p99.9", "max_len", "item_id", "num_rows", "random_window", "half of L^2", "batching.max_tokens"):
        assert word in told
    stats(store.path, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(store_stats(store)))
    assert found["lengths"]["quantiles"]["max"] == 4
    assert found["tables"][0] == {"name": "item_id", "num_rows": 2, "kind": "vocabulary", "features": ["item_id"], "num_unknown": 0}
