"""What a checkpoint says of itself: its files with size and hash, the run's state, and a hash of all that."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distrag.checkpoint.files import hash_file, write_whole

MANIFEST = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"[\w.\-]+")


class Damage(Exception):
    """What is wrong with a checkpoint, in a few words; it is then passed over or refused."""


@dataclass(frozen=True)
class Mark:
    """How a file is known again: its size in bytes, and its sha256 in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        files: each file beside the manifest.
        state: small JSON-able values of the run.
    """

    files: Mapping[str, Mark]
    state: Mapping[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, which makes a folder a checkpoint; a former one is replaced whole."""
    files = {name: {"bytes": mark.bytes, "sha256": mark.sha256} for name, mark in sorted(manifest.files.items())}
    body = {"format": FORMAT, "files": files, "state": dict(manifest.state)}
    body = json.loads(json.dumps(body))  # as it will be read: keys are text
    write_whole(folder / MANIFEST, json.dumps({**body, "sha256": _hash(body)}, indent=1))


def _hash(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint, its own hash checked.

    Raises:
        Damage: it is gone, cut, of another format, or not as it was written.
    """
    try:
        body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damage(f"{MANIFEST} is gone, or its save was cut") from None
    except (OSError, ValueError) as error:
        raise Damage(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise Damage(f"{MANIFEST} holds no JSON object")
    if body.pop("sha256", None) != _hash(body):
        raise Damage(f"{MANIFEST} is not as it was saved (its sha256 differs)")
    if body.get("format") != FORMAT:
        raise Damage(f"{MANIFEST} has format {body.get('format')}, this version of distrag reads {FORMAT}")
    return _build(body)


def _build(body: dict[str, Any]) -> Manifest:
    files, state = body.get("files"), body.get("state")
    if not isinstance(files, dict) or not isinstance(state, dict) or not all(_is_mark(name, mark) for name, mark in files.items()):
        raise Damage(f"{MANIFEST} holds other values than a manifest has")
    return Manifest({name: Mark(mark["bytes"], mark["sha256"]) for name, mark in files.items()}, state)


def _is_mark(name: str, mark: Any) -> bool:
    inside = _NAME.fullmatch(name) is not None and name not in (".", "..", MANIFEST)  # a name that leads out of the folder is none of ours
    return inside and isinstance(mark, dict) and type(mark.get("bytes")) is int and isinstance(mark.get("sha256"), str)


def check_sizes(folder: Path, manifest: Manifest) -> str:
    """Returns which files are gone or have another size, '' for none."""
    wrong = []
    for name, mark in manifest.files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is gone")
        elif path.stat().st_size != mark.bytes:
            wrong.append(f"{name} has {path.stat().st_size:,} of {mark.bytes:,} bytes")
    return "; ".join(wrong)


def check_hashes(folder: Path, manifest: Manifest, names: Sequence[str], damage: list[str]) -> Iterator[None]:
    """Reads files and appends to `damage` what is not as it was saved; yields now and then."""
    for name in names:
        try:
            found = yield from hash_file(folder / name)
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != manifest.files[name].sha256:
            damage.append(f"{name} is not as it was saved (its sha256 differs)")
