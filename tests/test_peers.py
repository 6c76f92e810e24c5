"""Who failed first, as every rank hears it: here the ranks are threads of one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distrag import peers as module
from distrag.leaving import RanksFailed, Stopped, leaving_error
from distrag.peers import Failure, Peers, describe

HOST = socket.gethostname()


class Ranks:
    """Some ranks that have met."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.values = size, threading.Barrier(size), {}
        self.pool = ThreadPoolExecutor(size)
        self.peers: list[Peers] = list(self.each(lambda rank: Peers.meet(rank, lambda value: self._exchange(rank, value), "localhost")))

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(10)
        found = [self.values[number] for number in range(self.size)]
        self.barrier.wait(10)
        return found

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        return [future.result(20) for future in [self.pool.submit(act, rank) for rank in range(self.size)]]

    def kill(self, rank: int) -> None:
        line = self.peers[rank]._line
        assert line is not None
        line.socket.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that ends

    def close(self) -> None:
        for one in self.peers:
            one.close()
        self.pool.shutdown()
        for thread in threading.enumerate():
            if thread.name in ("distrag-hub", "distrag-peers"):
                thread.join(10)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def test_all_are_watched_and_a_good_end_is_no_failure(three: Ranks) -> None:
    assert [one.watched for one in three.peers] == [[0, 1, 2]] * 3
    for one in reversed(three.peers):
        one.close()
    time.sleep(0.5)
    assert [one.verdict for one in three.peers] == [()] * 3


def test_the_first_error_of_its_own_is_the_verdict_whoever_misses_whom_before(three: Ranks) -> None:
    three.peers[1].where = "train step 3"
    acts = {0: ("lost", "RuntimeError: closed by peer"), 1: ("failed", "ValueError: bad row 17"), 2: ("lost", "RuntimeError: reset")}
    verdicts = three.each(lambda rank: (time.sleep(0.1 * (rank == 1)), three.peers[rank].report(*acts[rank]))[1])
    for verdict in verdicts:
        assert [(each.rank, each.host, each.kind) for each in verdict] == [(1, HOST, "failed")]
        assert describe(verdict, 3) == f"rank 1 of 3 (host {HOST}) failed at train step 3:\nValueError: bad row 17"


def test_a_rank_whose_process_ends_is_named_by_all_that_miss_it(three: Ranks) -> None:
    three.peers[0].where = "train step 5"
    three.kill(2)
    for rank in (0, 1):
        told = leaving_error(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), three.peers[rank])
        assert isinstance(told, RanksFailed)
        assert str(told).startswith(f"rank 2 of 3 (host {HOST}) ended without a word near train step 5: killed")


def test_a_hub_that_ends_is_rank_0(three: Ranks) -> None:
    verdict = (Failure(0, HOST, "silent"),)
    three.peers[1]._line.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    assert [(each.rank, each.kind) for each in three.peers[1].report("lost", "RuntimeError: gloo")] == [(0, "silent")]
    assert describe(verdict, 3).startswith(f"rank 0 of 3 (host {HOST}) ended without a word: killed")


def test_a_rank_that_does_not_come_is_stuck_and_is_ended(three: Ranks) -> None:
    ended: list[int] = []
    three.peers[1].on_stuck = lambda verdict: ended.append(verdict[0].rank)
    error = "RuntimeError: Timed out waiting 4000ms for recv operation to complete"
    verdicts = three.each(lambda rank: three.peers[rank].report("lost", error) if rank != 1 else ())
    assert [(each.rank, each.kind) for each in verdicts[0]] == [(each.rank, each.kind) for each in verdicts[2]] == [(1, "stuck")]
    time.sleep(0.1)
    assert ended == [1]


def test_a_main_thread_that_does_not_leave_after_a_verdict_is_ended(three: Ranks) -> None:
    ended: list[int] = []
    for one in three.peers:
        one.on_stuck = lambda verdict, rank=one.rank: ended.append(rank)
    three.peers[2].report("failed", "ValueError: bad row 17")
    time.sleep(0.8)
    assert sorted(ended) == [0, 1]


def test_the_others_of_a_rank_that_is_stopped_stop_with_its_code(three: Ranks) -> None:
    def leave(rank: int) -> BaseException:
        error = Stopped(75, "SIGTERM") if rank == 1 else RuntimeError("[gloo/transport] Connection reset by peer")
        return leaving_error(error, three.peers[rank])

    for told in three.each(leave):
        assert isinstance(told, Stopped)
        assert told.code == 75


def test_strangers_at_the_port_are_sent_away(three: Ranks) -> None:
    hub = next(thread for thread in threading.enumerate() if isinstance(thread, module._Hub))
    port = hub._server.getsockname()[1]
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"token": "wrong", "rank": 1}\n', b"[1]\n", b""):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(text)
    three.peers[2].report("failed", "ValueError: bad row 17")
    assert [each.rank for each in three.peers[0].report("lost", "gloo")] == [2]


def test_an_error_of_ones_own_stays_as_it_is() -> None:
    alone = Peers(0, [HOST])
    for error in (ValueError("bad row 17"), KeyError("item"), ConnectionResetError(104, "Connection reset by peer"), MemoryError()):
        assert leaving_error(error, alone) is error
    full = leaving_error(OSError(28, "No space left on device", "runs/a/metrics.jsonl"), alone)
    assert isinstance(full, ValueError)
    assert "runs/a/metrics.jsonl" in str(full)
