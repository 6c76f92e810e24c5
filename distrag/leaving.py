"""What a rank leaves with when its world ends early: its own error, or the one of the rank that failed first."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress

from distrag.peers import Failure, Peers, Verdict, describe
from distrag.problem import problem

PREEMPTED, CTRL_C = 75, 130
"""Exit codes of a run that was asked to stop by SIGTERM, and by SIGINT. Under an elastic torchrun 0 would mean that the job is done."""
REFUSED = 2
"""Exit code of a command that was given what cannot be; it is the same however often it is started."""


class Stopped(SystemExit):
    """The ranks were asked to stop, and did.

    Args:
        code: the exit code.
        by: what asked, such as `SIGTERM`.
        said: what the user has not been told yet; '' for nothing.
        together: whether all ranks leave from the same point.
    """

    def __init__(self, code: int, by: str, said: str = "", *, together: bool = False) -> None:
        super().__init__(code)
        self.by, self.said, self.together = by, said, together


class RanksFailed(RuntimeError):
    """Another rank failed or died first; the text names it, its host and its first error."""


def leaving_error(error: BaseException, peers: Peers) -> BaseException:
    """Returns what this rank is to raise in place of `error`, after the others have been told of it and the culprit has ended.

    Args:
        error: what ended the block of the open world.
        peers: who of the ranks lives.
    """
    if isinstance(error, Stopped) and error.together:
        peers.close()
        return error
    own, kind = _own_error(error, peers)
    code = own.code if isinstance(own, SystemExit) and isinstance(own.code, int) else CTRL_C if kind == "stopped" else 1
    said = getattr(own, "by", "") if kind == "stopped" else _describe_error(own, kind)
    if kind == "failed":
        _write_down(peers, [Failure(peers.rank, peers.hosts[peers.rank], kind, said, peers.where, code, time.time())])
    verdict = peers.report(kind, said, code)
    if kind == "failed" or len(peers.hosts) == 1 or (kind == "stopped" and verdict[0].kind in ("stopped", "lost")):
        return own
    peers.outlive(verdict)
    return verdict_error(verdict, peers)


def verdict_error(verdict: Verdict, peers: Peers) -> BaseException:
    """Returns the error of a rank that ends because of others; writes down those that could not do it themselves."""
    if verdict[0].kind == "stopped":
        # Ranks that train stop together: this is the start. The first rank tells, though another was asked.
        said = f"stopped by {verdict[0].error} before the first step; there was nothing to save" if peers.rank == 0 else ""
        return Stopped(verdict[0].code, verdict[0].error, said)
    _write_down(peers, verdict)
    return RanksFailed("\n".join(filter(None, [describe(verdict, len(peers.hosts)), peers.todo])))


def _own_error(error: BaseException, peers: Peers) -> tuple[BaseException, str]:
    """Returns the error behind what was raised, and which kind of news it is."""
    failures = getattr(error, "failures", None)  # of a save or load that torch did on all ranks; each of them has everybody's errors
    if isinstance(failures, dict) and failures:
        if peers.rank not in failures:
            return error, "lost"
        error = failures[peers.rank][0]
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return error, "stopped"
    if any(_tells_of_another(each) for each in _chain(error)):
        return error, "lost"
    return _as_problem(error, peers), "failed"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or now.__context__


def _tells_of_another(error: BaseException) -> bool:
    """Returns whether an error is that of a collective that another rank did not finish. gloo raises plain RuntimeErrors."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return type(error) is RuntimeError and re.search(r"gloo|NCCL|[Cc]onnection (closed|reset) by peer", str(error)) is not None


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)


def _as_problem(error: BaseException, peers: Peers) -> BaseException:
    if isinstance(error, OSError) and error.errno in _DISK:
        todo = "free or unlock the disk, or choose another folder"
        where = error.filename or f"host {peers.hosts[peers.rank]}, {peers.where or 'at the start'}"
        return problem("A file cannot be read or written", got=error.strerror, wanted="a working, writable place", where=where, todo=todo)
    return error


def _describe_error(error: BaseException, kind: str) -> str:
    text = str(error)
    if isinstance(error, ValueError) and "\n  got:" in text:
        return text
    return f"{type(error).__name__}: {text if kind == 'failed' else text.splitlines()[0] if text else ''}"


def _write_down(peers: Peers, failures: list[Failure] | Verdict) -> None:
    """Writes `errors/rank-<r>.json` of the run; for a rank that cannot, the first of the others does."""
    culprits = {failure.rank for failure in failures}
    others = [rank for rank in range(len(peers.hosts)) if rank not in culprits]
    if peers.errors is None or (peers.rank not in culprits and peers.rank != others[0]):
        return
    for failure in failures:
        path = peers.errors / f"rank-{failure.rank}.json"
        part = path.with_name(f"{path.name}.part-{peers.rank}")
        try:
            peers.errors.mkdir(exist_ok=True)
            if not path.exists():  # who failed knows best
                part.write_text(json.dumps({**dataclasses.asdict(failure), "size": len(peers.hosts)}, indent=1) + "\n", encoding="utf-8")
                part.replace(path)
        except OSError:  # the disk may be what failed; another rank has its own
            with suppress(OSError):
                part.unlink()
