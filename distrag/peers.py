"""Who of the ranks lives, and who failed first.

A collective on gloo says no more than that a neighbour is gone; on nccl it may say nothing at all. So every rank holds a connection to a
hub beside rank 0. The kernel ends it when the process ends, however that ends, and a rank that fails says so first. The hub tells all
ranks one verdict; a rank whose main thread does not leave after that is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_S = {"failed": 0.3, "silent": 0.3, "stopped": 1.0, "lost": 2.5}
"""Kinds of news, those that tell most first, and for how long the hub waits for better ones before it decides.

`failed`: a rank met an error of its own. `silent`: its process ended without a word. `stopped`: it was asked to stop. `lost`: it only
met the absence of another.
"""
ANSWER_S = 5.0
"""How long a rank waits for a verdict; above every time of `SETTLE_S`."""
GRACE_S = 6.0
"""How long after a verdict a main thread may stay where it is, such as in a collective that will never end."""


@dataclass(frozen=True)
class Failure:
    """What is known of a rank that ended before the others.

    Attributes:
        rank: its number.
        host: its machine.
        kind: a key of `SETTLE_S`, or `stuck`: it lives, but did not come to a collective in time.
        error: type and text of its first error; '' where it said nothing.
        where: what it did then, such as `train step 12`; of a rank that said nothing, what rank 0 did.
        code: the exit code that it leaves with.
        at: seconds since the epoch, on the clock of whoever noticed.
    """

    rank: int
    host: str
    kind: str
    error: str = ""
    where: str = ""
    code: int = 1
    at: float = 0.0


Verdict = tuple[Failure, ...]


def describe(verdict: Verdict, size: int) -> str:
    """Returns who failed and why, in a few lines, the culprit's own error first.

    Args:
        verdict: one or more failures of the same kind.
        size: number of ranks.
    """
    first, ranks = verdict[0], ", ".join(str(failure.rank) for failure in verdict)
    hosts = ", ".join(dict.fromkeys(failure.host for failure in verdict))
    who = f"{'rank' if len(verdict) == 1 else 'ranks'} {ranks} of {size} (host {hosts})"
    if first.kind == "failed":
        return f"{who} failed{f' at {first.where}' if first.where else ''}:\n{first.error}"
    if first.kind == "silent":
        near = f" near {first.where}" if first.where else ""
        return f"{who} ended without a word{near}: killed, perhaps for want of memory; the log of the machine or scheduler may tell"
    if first.kind == "stuck":
        return f"{who} did not come to a collective within train.timeout_s and hung{f' near {first.where}' if first.where else ''}"
    if first.kind == "stopped":
        return f"{who} was stopped by {first.error or 'a signal'}"
    return f"{who} lost the others{f' at {first.where}' if first.where else ''}: {first.error}"


class Peers:
    """This rank's connection to the hub.

    Args:
        rank: this rank.
        hosts: machine of every rank.
        line: to the hub; None in a world of one rank, and where the hub cannot be reached.

    Attributes:
        where: what this rank is doing, for messages; set by whoever does it.
        errors: folder where first errors are written down; None for nowhere.
        todo: what a user can do after a failure.
        watched: ranks that the hub sees.
        on_stuck: called on a thread of its own when a verdict is there and the main thread does not leave; it should end the process.
    """

    def __init__(self, rank: int, hosts: Sequence[str], line: _Line | None = None) -> None:
        self.rank, self.hosts, self.where, self.todo = rank, list(hosts), "", ""
        self.errors: Path | None = None
        self.watched: list[int] = []
        self.on_stuck: Callable[[Verdict], None] = lambda verdict: None
        self.verdict: Verdict = ()
        self._line, self._gone, self._news = line, set[int](), threading.Condition()
        self._leaving = self._over = False

    @classmethod
    def meet(cls, rank: int, exchange: Callable[[Any], list[Any]], near: str) -> Peers:
        """Returns this rank's connection. A collective: every rank calls it.

        Args:
            rank: this rank.
            exchange: gathers a picklable value of every rank.
            near: a host name or address that all ranks can reach; it tells on which of its addresses rank 0 is to be found.
        """
        host, hub = socket.gethostname(), _Hub() if rank == 0 else None
        told = exchange((host, hub.invite(near) if hub is not None else None))
        hosts = [name for name, _ in told]
        if hub is not None:
            hub.hosts = hosts
            hub.start()
        peers = cls(rank, hosts, _call(rank, *told[0][1]))
        peers.watched = [number for number, reached in enumerate(exchange(peers._line is not None)) if reached]
        if hub is not None:
            hub.watched, hub.where = set(peers.watched), lambda: peers.where
        if peers._line is not None:
            threading.Thread(target=peers._listen, name="distrag-peers", daemon=True).start()
        return peers

    def report(self, kind: str, error: str = "", code: int = 1) -> Verdict:
        """Says that this rank is about to leave; returns what the hub makes of it, or this rank's own word where no hub answers.

        Args:
            kind: a key of `SETTLE_S`.
            error: type and text of the error.
            code: the exit code it will leave with.
        """
        own = Failure(self.rank, self.hosts[self.rank], kind, error[:8000], self.where, code, time.time())
        self._leaving = True
        if self._line is None:
            return (own,)
        self._line.send(dataclasses.asdict(own))
        with self._news:
            self._news.wait_for(lambda: bool(self.verdict) or self._over, ANSWER_S)
        if not self.verdict and not self._over and kind == "lost":  # a hub that lives and does not answer: its process hangs
            return (Failure(0, self.hosts[0], "stuck", where=self.where, at=own.at),)
        return self.verdict or (own,)

    def outlive(self, verdict: Verdict, limit_s: float = 3.0) -> None:
        """Returns when the processes of the culprits have ended, so that whoever watches all processes sees theirs end first."""
        culprits = {failure.rank for failure in verdict if failure.kind in ("failed", "silent", "stuck")} - {self.rank}
        if culprits and self._line is not None:
            with self._news:
                self._news.wait_for(lambda: culprits <= self._gone, limit_s)
            time.sleep(0.3)  # torchrun looks every 0.1 s

    def close(self) -> None:
        """Says goodbye: from now on nobody misses this rank, and it misses nobody."""
        self._leaving = self._over = True
        if self._line is not None:
            self._line.send({"bye": self.rank})

    def _listen(self) -> None:
        assert self._line is not None
        for message in self._line:
            with self._news:
                if "verdict" in message and not self.verdict:
                    self._take(tuple(Failure(**each) for each in message["verdict"]))
                self._gone |= {message["gone"]} if "gone" in message else set()
                self._over |= "bye" in message
                self._news.notify_all()
        self._line.socket.close()
        with self._news:
            self._gone.add(0)
            if not self._over and not self.verdict:
                self._take((Failure(0, self.hosts[0], "silent", where=self.where, at=time.time()),))
            self._news.notify_all()

    def _take(self, verdict: Verdict) -> None:
        self.verdict = verdict

        def end() -> None:
            if not self._leaving:
                self.on_stuck(verdict)

        hangs = any(failure.kind == "stuck" and failure.rank == self.rank for failure in verdict)
        timer = threading.Timer(0.0 if hangs else GRACE_S, end)
        timer.daemon = True
        timer.start()


class _Line:
    """JSON objects over a socket, one a line; iterating ends where the connection does."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self._rest, self._messages = sock, b"", self._iterate()
        for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # a machine that lost its power ends no connection: it is missed after 10 s
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Returns the objects that have come whole; waits for bytes, and gives None at the end of the connection."""
        try:
            new = self.socket.recv(65536)
        except OSError:
            new = b""
        *whole, self._rest = (self._rest + new).split(b"\n")
        return [json.loads(line) for line in whole] if new else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._messages  # one for all: what came together with an object that was taken is kept for the next

    def _iterate(self) -> Iterator[dict[str, Any]]:
        while (messages := self.read()) is not None:
            yield from messages


def _call(rank: int, addresses: Sequence[str], port: int, token: str) -> _Line | None:
    for address in addresses:
        try:
            line = _Line(socket.create_connection((address, port), timeout=5.0))
            line.send({"token": token, "rank": rank})
            if next(iter(line), {}).get("welcome") == token:  # another program may have that port on another machine
                line.socket.settimeout(None)
                return line
            line.socket.close()
        except (OSError, ValueError):
            continue
    return None


class _Hub(threading.Thread):
    """Hears of every rank's end and tells all ranks one verdict."""

    def __init__(self) -> None:
        super().__init__(name="distrag-hub", daemon=True)
        double = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if double else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=double)
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self.hosts: list[str] = []
        self.watched: set[int] = set()
        self.where: Callable[[], str] = lambda: ""
        self._lines: dict[int, _Line] = {}
        self._news: list[Failure] = []
        self._done: set[int] = set()
        self._decide_at = float("inf")
        self._decided = False

    def invite(self, near: str) -> tuple[list[str], int, str]:
        """Returns where this process may be found, its port, and the word that tells it from others."""
        addresses = [socket.gethostname(), "127.0.0.1"]
        with contextlib.suppress(OSError):
            info = socket.getaddrinfo(near, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
                probe.connect(info[4])  # sends nothing; the kernel chooses the address that `near` would see
                addresses.insert(0, str(probe.getsockname()[0]))
        return list(dict.fromkeys(addresses)), int(self._server.getsockname()[1]), self._token

    def run(self) -> None:
        """Serves until rank 0 says goodbye."""
        while 0 not in self._done:
            wait_s = max(0.0, self._decide_at - time.monotonic()) if self._decide_at < float("inf") else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    self._greet()
                else:
                    self._hear(key.data)
            if time.monotonic() >= self._decide_at:
                self._decide()
        self._tell({"bye": 0})
        for line in self._lines.values():
            line.socket.close()
        self._selector.close()
        self._server.close()

    def _greet(self) -> None:
        sock, _ = self._server.accept()
        line = _Line(sock)
        sock.settimeout(2.0)  # a stranger who says nothing must not hold up the ranks
        try:
            hello: Any = next(iter(line), None)
        except ValueError:
            hello = None
        if not isinstance(hello, dict) or hello.get("token") != self._token:
            sock.close()
            return
        sock.settimeout(None)
        self._lines[hello["rank"]] = line
        self._selector.register(sock, selectors.EVENT_READ, hello["rank"])
        line.send({"welcome": self._token})

    def _hear(self, rank: int) -> None:
        messages = self._lines[rank].read()
        if messages is None:
            self._selector.unregister(self._lines[rank].socket)
            self._lines.pop(rank).socket.close()
            self._tell({"gone": rank})
            if rank not in self._done and all(news.rank != rank for news in self._news):
                self._hear_of(Failure(rank, self.hosts[rank], "silent", where=self.where(), at=time.time()))
            return
        for message in messages:
            if "bye" in message:
                self._done.add(rank)
            else:
                self._hear_of(Failure(**message))

    def _hear_of(self, news: Failure) -> None:
        self._news.append(news)
        if not self._decided:
            self._decide_at = min(self._decide_at, time.monotonic() + SETTLE_S[news.kind])

    def _decide(self) -> None:
        self._decided, self._decide_at = True, float("inf")
        kinds = [kind for kind in SETTLE_S if any(news.kind == kind for news in self._news)]
        chosen = [news for news in self._news if news.kind == kinds[0]]
        if kinds[0] == "lost" and any("imed out" in news.error for news in chosen):
            quiet = self.watched - self._done - {news.rank for news in chosen}
            where = chosen[0].where
            stuck = [Failure(rank, self.hosts[rank], "stuck", where=where, at=time.time()) for rank in sorted(quiet)]
            chosen = stuck or chosen
        self._tell({"verdict": [dataclasses.asdict(each) for each in (chosen if kinds[0] in ("silent", "lost") else chosen[:1])]})

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._lines.values():
            line.send(message)
