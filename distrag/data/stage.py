"""A store from elsewhere in a local cache: only the blocks that are asked for, each checked before it counts.

`CACHE/<hashes>/` is a store like any other, but its files have holes where nothing was asked for; `staged` holds a byte for each block that
is there. Processes that stage at once take turns, and one that is killed leaves blocks that do not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distrag.data.blocks import BLOCKS, parse_blocks
from distrag.data.content import SAMPLES, column_bytes, vocabulary_name
from distrag.data.remote import Remote
from distrag.data.schema import SCHEMA_FILE, parse_schema
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

DEFAULT_CACHE = "data/cache"
STAGED = "staged"
_TURN_BYTES = 64 << 20
_ENDS_BYTES = 1 << 20
"""What Arrow writes before the first column and after the last is far smaller."""


class Stage:
    """One store elsewhere and its folder in the cache.

    Args:
        url: its address, or a folder that is copied as if it were one.
        cache: folder of all stores that were staged; made where it is missing.

    Attributes:
        folder: where this store lies in the cache; another content at the same address has another folder.

    Raises:
        ValueError: when there is no store there, it cannot be reached, or it was prepared without block sums.
    """

    def __init__(self, url: str | Path, cache: str | Path = DEFAULT_CACHE) -> None:
        self.remote = Remote(url)
        text = self.remote.read(SCHEMA_FILE)
        schema = parse_schema(text, self.remote.name(SCHEMA_FILE))
        if not re.fullmatch("[0-9a-f]{32}", schema.content_hash) or not re.fullmatch("[0-9a-f]{64}", schema.blocks_hash):
            todo = "run `distrag prepare` again with --overwrite, or copy the store to a local folder and give that"
            raise problem("The store has no block sums", got="none", wanted=BLOCKS, where=self.remote.url, todo=todo)
        sums = self._read_sums(schema.blocks_hash)
        names = [SAMPLES, *(vocabulary_name(t.name) for t in schema.tables if t.kind == "vocabulary")]
        self._blocks = parse_blocks(sums, names, self.remote.name(BLOCKS))
        self.folder = Path(cache) / f"{schema.content_hash}-{schema.blocks_hash[:8]}"
        self._small = {SCHEMA_FILE: text, BLOCKS: sums}

    def _read_sums(self, wanted: str) -> bytes:
        for _ in range(2):
            text = self.remote.read(BLOCKS)
            if hashlib.sha256(text).hexdigest() == wanted:
                return text
            self.remote.forget()
        got = f"sha256 {hashlib.sha256(text).hexdigest()}, {len(text)} bytes"
        raise problem("A file is not what was prepared", got=got, wanted=f"sha256 {wanted}", where=self.remote.name(BLOCKS), todo=_AGAIN)

    def fetch(self, rows: NDArray[np.int64] | None = None) -> Iterator[None]:
        """Fetches what the cache lacks, yielding every few seconds so that a rank can tell the others that it lives.

        Args:
            rows: int64 `[K, 2]`, first row and one past the last of each span; None fetches the whole store, an empty one the lengths.

        Raises:
            ValueError: when the cache has no room or cannot be written, or a block is not what was prepared after two attempts.
        """
        wanted = np.ones(len(self._blocks), bool)
        if rows is not None:
            wanted[self._blocks.span(SAMPLES)] = False
            for start, end in ((0, _ENDS_BYTES), (self._blocks.sizes[SAMPLES] - _ENDS_BYTES, None)):
                wanted[self._blocks.span(SAMPLES, max(start, 0), end)] = True
            yield from self._fetch(wanted)
            wanted |= self._blocks_of_lengths()
            yield from self._fetch(wanted)
            wanted |= self._blocks_of_rows(rows)
        yield from self._fetch(wanted)

    def _blocks_of_lengths(self) -> NDArray[np.bool_]:
        """Returns the blocks of what every reader needs: where each row starts."""
        start, width, size = column_bytes(self.folder / SAMPLES)["offsets"]
        return self._mask([(start, start + width * size)])

    def _blocks_of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns the blocks of these rows in every column."""
        columns = column_bytes(self.folder / SAMPLES)
        start, _, size = columns.pop("offsets")
        offsets = np.memmap(self.folder / SAMPLES, np.int64, "r", start, size)
        spans = []
        for first, end in rows.tolist():
            for name, (start, width, _) in columns.items():
                a, b = (int(offsets[first]), int(offsets[end])) if name.startswith("history:") else (first, end)
                spans.append((start + a * width, start + b * width))
        return self._mask(spans)

    def _mask(self, spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._blocks), bool)
        for start, end in spans:
            mask[self._blocks.span(SAMPLES, start, end)] = True
        return mask

    def _fetch(self, wanted: NDArray[np.bool_]) -> Iterator[None]:
        most = max(1, _TURN_BYTES // self._blocks.block_bytes)
        for turn in itertools.count():
            missing = np.flatnonzero(wanted & ~read_staged(self.folder, len(wanted)))
            if not len(missing) and self._is_laid_out():
                return
            if not turn:
                self._check_room(missing)
            with self._writing(), _turn(self.folder) as mine:
                if mine:
                    if not turn:
                        self._tell(missing)
                    marks = self._lay_out()
                    missing = np.flatnonzero(wanted & (marks == 0))[:most]
                    self._copy(missing, marks)
                else:
                    time.sleep(0.05)
            yield

    def _is_laid_out(self) -> bool:
        return all(_size(self.folder / name) == size for name, size in self._blocks.sizes.items()) and all(
            _holds(self.folder / name, text) for name, text in self._small.items()
        )

    def _lay_out(self) -> NDArray[np.uint8]:
        """Returns the marks of the blocks, after making what is missing of the folder; a file that is made anew loses its marks."""
        if _size(self.folder / STAGED) != len(self._blocks):
            _write(self.folder / STAGED, bytes(len(self._blocks)))
        marks = np.memmap(self.folder / STAGED, np.uint8, "r+")
        for name, size in self._blocks.sizes.items():
            path = self.folder / name
            if _size(path) != size:
                marks[self._blocks.span(name)] = 0
                path.parent.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)  # who has the old one mapped keeps it
                with path.open("xb") as file:
                    file.truncate(size)  # holes take no room until they are filled
        for name, text in self._small.items():
            if not _holds(self.folder / name, text):
                _write(self.folder / name, text)
        return marks

    def _copy(self, blocks: NDArray[np.int64], marks: NDArray[np.uint8]) -> None:
        """Writes blocks that are right and marks them; what is wrong is asked for once more, and refused when it stays so."""
        found = self._read(blocks.tolist())
        wrong = [block for block in found if self._fault(block, found[block])]
        if wrong:
            self.remote.forget()
            found |= self._read(wrong)
        for fault in filter(None, (self._fault(block, found[block]) for block in wrong)):
            raise fault
        files: dict[str, list[int]] = {}
        for block in found:
            files.setdefault(self._blocks.place(block)[0], []).append(block)
        for name, its in files.items():
            with (self.folder / name).open("r+b") as file:
                for block in its:
                    file.seek(self._blocks.place(block)[1])
                    file.write(found[block])  # type: ignore[arg-type]
                file.flush()
                os.fdatasync(file.fileno())  # before the marks: a machine that stops must not leave marks of what was not written
            marks[its] = 1

    def _read(self, blocks: list[int]) -> dict[int, bytes | Exception]:
        files: dict[str, list[int]] = {}
        for block in blocks:
            files.setdefault(self._blocks.place(block)[0], []).append(block)
        found: dict[int, bytes | Exception] = {}
        for name, its in files.items():
            found |= zip(its, self.remote.read_ranges(name, [self._blocks.place(block)[1:] for block in its]), strict=True)
        return found

    def _fault(self, block: int, content: bytes | Exception) -> ValueError | None:
        name, start, end = self._blocks.place(block)
        if isinstance(content, Exception):
            return self.remote.fault(name, content)
        found = hashlib.sha256(content).hexdigest()
        if found == self._blocks.sums[block]:
            return None
        size, where, wanted = self.remote.size(name), f"{self.remote.name(name)}, bytes {start} to {end}", self._blocks.sizes[name]
        if size is not None and size != wanted:
            return problem(
                "A file is not of the size that was prepared", got=f"{size} bytes", wanted=f"{wanted} bytes", where=where, todo=_AGAIN
            )
        if len(content) > end - start:
            todo = "serve the store from a place that answers ranges of bytes, or copy it to a local folder and give that"
            return problem(
                "Ranges of bytes are not answered", got=f"{len(content)} bytes", wanted=f"{end - start} bytes", where=where, todo=todo
            )
        got = f"sha256 {found}, {len(content)} bytes"
        return problem("A file is not what was prepared", got=got, wanted=f"sha256 {self._blocks.sums[block]}", where=where, todo=_AGAIN)

    def _check_room(self, missing: NDArray[np.int64]) -> None:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        need = self._blocks.num_bytes(missing)
        if need > free:
            got = f"{free / 2**30:.3g} GiB free"
            raise problem("The cache has no room", got=got, wanted=f"{need / 2**30:.3g} GiB", where=self.folder.parent, todo=_ROOM)

    def _tell(self, missing: NDArray[np.int64]) -> None:
        need = self._blocks.num_bytes(missing)
        if need > _TURN_BYTES:
            print(f"distrag: staging {need / 2**30:.3g} GiB of {self.remote.url} in {self.folder}", file=sys.stderr)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise problem(
                "The cache cannot be written", got=error.strerror, wanted="a writable folder", where=self.folder, todo=_ROOM
            ) from error


_AGAIN = "copy the whole store there again"
_ROOM = "free some room, or set data.cache (or open_store(cache=)) to another folder"


def read_staged(folder: Path, num_blocks: int | None = None) -> NDArray[np.bool_]:
    """Returns for each block of a store in the cache whether it is there; none is where the marks are not those of `num_blocks`."""
    path = folder / STAGED
    found = np.fromfile(path, np.uint8) if path.is_file() else np.zeros(0, np.uint8)
    return found != 0 if num_blocks in (None, len(found)) else np.zeros(num_blocks or 0, bool)


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Yields whether this process may write; the kernel takes the turn back from one that dies."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _size(path: Path) -> int:
    """Returns the bytes of a file of the cache, -1 where there is none; what a link leads to is none."""
    return path.stat().st_size if path.is_file() and not path.is_symlink() else -1


def _holds(path: Path, content: bytes) -> bool:
    return _size(path) == len(content) and path.read_bytes() == content


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
