"""What is no budget, no length or no state is refused with what to do, before anything is planned or moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrag.batching.plan import plan_epoch
from distrag.batching.sampler import TokenBudgetSampler

GOOD: dict[str, Any] = {"lengths": [3, 4, 0], "world_size": 2, "max_tokens": 8}


@pytest.mark.parametrize(
    "change",
    [
        *({"lengths": wrong} for wrong in ([3.5, 2.0], ["3", "4"], [True, False], None, [None, 4], [[1], [2, 3]], [2**70], [2**62] * 4, 5)),
        *({"lengths": np.array([2**63], np.uint64)}, {"lengths": np.array([np.nan, 1.0])}),
        *({"samples": wrong} for wrong in ([1, -1], [1, 1, 2], [1.7], [True, True, False], [1, 99], [[0, 1]], "ab")),
        *({"max_tokens": wrong} for wrong in (8.7, "8", float("nan"), 2**70, True, 0)),
        *({"world_size": wrong} for wrong in (2.5, "2", 0, -1, 70_000, True)),
        *({"cost": wrong} for wrong in ((1, 2), (1, 2, 3, 4), "abc", None, (1, float("nan"), 0), (1, -1, 0))),
        *({"seed": wrong} for wrong in (1.5, "a", 2**70)),
        *({"epoch": wrong} for wrong in (1.5, -1, 2**70)),
        *({name: wrong} for name in ("bucket_steps", "num_steps", "pool_samples", "max_samples") for wrong in (0, 1.5, "2")),
        *({"first_step": wrong} for wrong in (-3, 2**63, 0.5)),
    ],
)
def test_what_cannot_be_planned_is_refused_in_five_parts(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got:") as caught:
        plan_epoch(**{**GOOD, **change})
    assert all(part in str(caught.value) for part in ("got:", "wanted:", "where:", "to do:"))


def build(world_size: int = 2) -> TokenBudgetSampler:
    return TokenBudgetSampler(np.arange(100) % 9, max_tokens=40, num_replicas=world_size, rank=0)


def change_part(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**state, "parts": [{**state["parts"][0], **changes}]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_state_that_none_has_given_is_refused_and_moves_nothing(world_size: int) -> None:
    good = build().state_dict(2)
    wrong: list[Any] = [
        *({}, None, [], "x", 3),
        *({key: value for key, value in good.items() if key != gone} for gone in good),
        *({**good, "steps_done": value} for value in (-1, 2.5, True, 10**6, 2**70, "2", float("nan"))),
        *({**good, "epoch": value} for value in (-1, 1.5, 2**70)),
        *({**good, "seed": value} for value in ("a", 1.5)),
        *({**good, "fingerprint": value} for value in ("", None, 3, "0" * 16)),
        *({**good, "parts": value} for value in ([], None, [3], [{}])),
        *(change_part(good, until=value) for value in (-5, 1, 3, 2.5)),
        *(change_part(good, options=value) for value in (None, {}, {"world_size": 2})),
        change_part({**good, "steps_done": 10**6}, until=10**6),
    ]
    for state in wrong:
        sampler = build(world_size)
        sampler.set_epoch(1)
        before = list(sampler)
        if world_size == 3 and isinstance(state, dict) and state.get("steps_done") == 10**6 and state["parts"][0]["until"] == 10**6:
            continue  # of other ranks only their plan could tell, and it is past its end: the next epoch comes
        with pytest.raises(ValueError, match="got:") as caught:
            sampler.load_state_dict(state)
        assert all(part in str(caught.value) for part in ("got:", "wanted:", "where:", "to do:"))
        assert list(sampler) == before
        assert (sampler.epoch, sampler.start) == (1, 0)


@pytest.mark.parametrize("steps_done", ["x", -1, None, 2.5])
def test_steps_done_are_counted(steps_done: Any) -> None:
    with pytest.raises(ValueError, match="steps_done"):
        build().state_dict(steps_done)
