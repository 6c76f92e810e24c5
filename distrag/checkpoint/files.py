"""Files that outlive a crash: on the disk before they get their name, and known by a hash."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

_CHUNK_BYTES = 2**24


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the process is killed."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder are on the disk, where the file system can promise that."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems keep names by themselves
            raise
    finally:
        os.close(opened)


def copy_whole(source: Path, target: Path) -> None:
    """Copies a file and returns once it is on the disk."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        copy_whole(source, target)


def hash_file(path: Path) -> Generator[None, None, str]:
    """Yields now and then while it reads a file; returns its sha256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            yield
    return digest.hexdigest()


def hash_now(path: Path) -> str:
    """Returns the sha256 of a file in hex."""
    steps = hash_file(path)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return str(end.value)
