"""A rank that dies or fails ends the others within seconds, and they name it, its host and its first error."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.training.deaths import LIMIT_S, die
from tests.training.runs import write_histories


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_histories(tmp_path / "store", 120)
    return tmp_path / "cut"


@pytest.mark.parametrize(
    ("moment", "how", "world_size", "victim", "code", "said"),
    [
        ("backward", "kill", 3, 1, -9, "ended without a word near train step 3: killed"),
        ("saving", "kill", 2, 0, -9, "ended without a word near saving train step 4: killed"),
        ("all-to-all", "raise", 3, 2, 2, "failed at train step 1:\nValueError: bad row 17"),
        ("evaluation", "raise", 2, 0, 2, "failed at evaluation after train step 9:\nValueError: bad row 17"),
        ("loading", "raise", 2, 1, 2, "failed at train step 3:\nValueError: bad row 17"),
        ("forward", "full", 2, 1, 2, "failed at train step 3:\nA file cannot be read or written\n  got:    File too large"),
    ],
)
def test_the_others_end_at_once_and_name_the_rank_its_host_and_its_error(
    run: Path, moment: str, how: str, world_size: int, victim: int, code: int, said: str
) -> None:
    seen = die(run, moment, how, launcher="processes", world_size=world_size, victim=victim)
    assert seen.seconds < LIMIT_S
    assert seen.codes == [code if rank == victim else 1 for rank in range(world_size)]
    for rank in set(range(world_size)) - {victim}:
        last = seen.said[rank][seen.said[rank].index("distrag train:") :]
        assert last.startswith(f"distrag train: rank {victim} of {world_size} (host {socket.gethostname()}) {said}")
        assert len(last.splitlines()) < 9
    assert not re.search("Traceback|gloo", "".join(seen.said))
    written = json.loads((run / "run" / "errors" / f"rank-{victim}.json").read_text())
    assert (written["rank"], written["host"]) == (victim, socket.gethostname())
    assert [path.name for path in (run / "run" / "errors").iterdir()] == [f"rank-{victim}.json"]
    again = die(run, "", "", launcher="processes", world_size=world_size, victim=0, train__resume=True)
    assert again.codes == [0] * world_size
    assert not (run / "run" / "errors").exists()


def test_a_save_that_fails_on_one_rank_is_agreed_on_and_costs_no_checkpoint(run: Path) -> None:
    seen = die(run, "saving", "full", launcher="processes", world_size=2, victim=1)
    assert seen.seconds < LIMIT_S
    assert seen.codes == [2, 2]
    assert all("distrag train: A checkpoint cannot be written" in said for said in seen.said)
    assert re.search(r"got: +rank 1: .*File too large", seen.said[0])
    assert not re.search("Traceback|gloo", "".join(seen.said))
    again = die(run, "", "", launcher="processes", world_size=2, victim=0, train__resume=True)
    assert again.codes == [0, 0]


def test_a_rank_that_dies_while_a_save_is_written_beside_the_steps_is_named_as_soon(run: Path) -> None:
    seen = die(run, "saving", "kill", launcher="processes", world_size=2, victim=1, train__async_save=True)
    assert seen.seconds < LIMIT_S
    assert (seen.codes, seen.named) == ([1, -9], [1])
    again = die(run, "", "", launcher="processes", world_size=2, victim=0, train__resume=True, train__async_save=True)
    assert again.codes == [0, 0]


def test_a_rank_that_hangs_is_named_after_the_time_limit_of_a_collective_and_shows_where(run: Path) -> None:
    seen = die(run, "forward", "hang", launcher="processes", world_size=3, victim=1, train__timeout_s=4)
    assert seen.seconds < 4 + LIMIT_S
    assert seen.codes == [1, 1, 1]
    for rank in (0, 2):
        assert f"rank 1 of 3 (host {socket.gethostname()}) did not come to a collective within train.timeout_s" in seen.said[rank]
    assert re.search(r"it hangs here, the innermost call last:.*in act", seen.said[1], re.S)


def test_torchruns_own_summary_names_the_rank_that_failed_and_its_error(run: Path) -> None:
    seen = die(run, "backward", "raise", launcher="torchrun", world_size=2, victim=1)
    assert seen.seconds < LIMIT_S
    assert seen.codes == [1]
    assert set(seen.named) == {1}
    root: Any = re.search(r"Root Cause.*", seen.said[0], re.S)
    assert re.search(r"rank\s*: 1 .*exitcode\s*: 2 .*ValueError: bad row 17", root.group(), re.S)
    assert "gloo" not in seen.said[0]
