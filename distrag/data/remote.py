"""A store elsewhere: read through fsspec, and every fault of a network, a server or a missing package told in five parts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_QUOTED = ("http", "https")
_COPY = "or copy the store to a local folder and give that"


def is_url(path: str | Path) -> bool:
    """Returns whether a path is an address for fsspec, such as `s3://bucket/store` or `zip://store::file:///a.zip`."""
    return "://" in str(path) or "::" in str(path)


class Remote:
    """A folder on any file system that fsspec knows.

    Args:
        url: its address; a plain path is a local folder.

    Raises:
        ValueError: for an address of no known kind, one whose package is not installed, or one that cannot be reached.
    """

    def __init__(self, url: str | Path) -> None:
        import fsspec  # takes a while to import, and few runs need it

        self.url = str(url).rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
            self._by_address = _is_by_address(self._fs)
        except ImportError as error:
            todo = f"pip install what the message names, {_COPY}"
            raise problem("A package for this address is missing", got=error, wanted="its package", where=self.url, todo=todo) from error
        except Exception as error:
            todo = f"mend the address, {_COPY}"
            raise problem("No store can be read from this address", got=_told(error), wanted=_KINDS, where=self.url, todo=todo) from error
        if self._by_address and ("?" in self._root or "#" in self._root):
            todo = f"give the address of a folder whose files can be asked for by their names, {_COPY}"
            raise problem("An address with a query", got=self.url, wanted="no ? or # in it", where=self.url, todo=todo)

    def name(self, path: str) -> str:
        """Returns the address of a file of the store."""
        return f"{self.url}/{path}"

    def read(self, path: str) -> bytes:
        """Returns a small file of the store.

        Raises:
            ValueError: when it is missing or cannot be reached.
        """
        try:
            self._check_local(path)
            content: bytes = self._fs.cat_file(self._path(path))
        except Exception as error:
            raise self.fault(path, error) from error
        return content

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes | Exception]:
        """Returns the bytes from start to end of each range, or why they could not be read; all at once where the file system can."""
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            self._check_local(path)
            return list(self._fs.cat_ranges([self._path(path)] * len(ranges), starts, ends, on_error="return"))
        except Exception as error:  # some file systems raise all the same
            return [error] * len(ranges)

    def size(self, path: str) -> int | None:
        """Returns the bytes of a file, or None where they cannot be told."""
        try:
            size: int | None = self._fs.size(self._path(path))
        except Exception:
            return None
        return size

    def forget(self) -> None:
        """Forgets what was listed, so that the next reading sees what has changed there."""
        self._fs.invalidate_cache()

    def fault(self, path: str, error: Exception) -> ValueError:
        """Returns the five-part error of a file that could not be read."""
        if isinstance(error, FileNotFoundError):
            todo = "mend the address, or copy the whole store there again"
            return problem("A file of the store is missing", got="no such file", wanted=path, where=self.name(path), todo=todo)
        todo = f"see that the address can be reached and read from here, {_COPY}"
        return problem("The store cannot be reached", got=_told(error), wanted=f"the content of {path}", where=self.name(path), todo=todo)

    def _check_local(self, path: str) -> None:
        """Refuses what is no file of this machine: a pipe would be waited for."""
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._fs, LocalFileSystem) and not os.path.isfile(self._path(path)):
            raise FileNotFoundError(path)

    def _path(self, path: str) -> str:
        # Names of vocabularies are quoted on disk; a server undoes one quoting of what is asked of it.
        asked = quote(path) if self._by_address else path
        return f"{self._root.rstrip('/')}/{asked}" if self._root else asked


def _is_by_address(fs: Any) -> bool:
    """Returns whether a file system asks a web server; caches and folders of other file systems ask what they wrap."""
    while hasattr(fs, "fs"):
        fs = fs.fs
    protocol = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
    return any(name in _QUOTED for name in protocol)


_KINDS = "an address that fsspec knows, such as s3://bucket/store, or a folder"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
