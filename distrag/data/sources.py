"""Data sets that `distrag prepare` knows by name: ml-100k, real and small, and synthetic, any size with a pattern to learn."""

from __future__ import annotations

import hashlib
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from distrag.data.events import group_events
from distrag.data.files import Rows, check_path, is_parquet, parquet_rows, table_rows
from distrag.data.recipe import FeatureRecipe
from distrag.data.synthetic import SyntheticConfig, synthetic_rows
from distrag.data.text_file import read_small
from distrag.problem import problem

__all__ = ["MovieLensConfig", "SyntheticConfig", "fetch_wheel", "movielens_rows", "named_rows"]

WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_EVENTS = ("ml-100k.inter", "u.data")
_USERS = ("ml-100k.user", "u.user")
# Of the lines without header, tabs between the values: the same for the files of GroupLens and those in the wheel.
_EVENTS_SHA256 = "f30dc7fc1d0a843b086c92eb2fab6a21a99a3d1acc149cfb73b3e6594a8d394b"
_USERS_SHA256 = "a89f2c072111c1f28e466d716df901501580227dab2aeb7525bf6e00ec09f393"


@dataclass(frozen=True)
class MovieLensConfig:
    """Where ml-100k comes from.

    Args:
        path: folder or archive that holds it (`u.data` and `u.user`, or `ml-100k.inter` and `ml-100k.user`), or a Parquet file of it;
            otherwise it is taken out of a wheel of recbole 1.2.1, which pip downloads once.
        cache: folder for the downloaded wheel; otherwise `~/.cache/distrag`.
    """

    path: str | None = None
    cache: str | None = None


def named_rows(name: str, ml_100k: MovieLensConfig, synthetic: SyntheticConfig, read_rows: int) -> tuple[Rows, dict[str, Any]] | None:
    """Returns the rows of a named source and the recipe sections that belong to it; None when no source has this name."""
    if name == "ml-100k":
        return movielens_rows(ml_100k, read_rows), _MOVIELENS
    if name == "synthetic":
        return synthetic_rows(synthetic), _SYNTHETIC
    return None


def movielens_rows(config: MovieLensConfig, read_rows: int) -> Rows:
    """Returns one row a user of ml-100k: item_id, rating, timestamp by event in file order, and age, gender, occupation.

    Raises:
        ValueError: when the files are not found, cannot be fetched, or are not the known ones.
    """
    path = Path(config.path) if config.path is not None else None
    if path is not None:
        check_path(path)
    if path is not None and os.path.isfile(path) and is_parquet(path):
        return parquet_rows([path], read_rows)
    place = path or fetch_wheel(Path(config.cache) if config.cache is not None else Path.home() / ".cache" / "distrag")
    events = _table(_read(place, _EVENTS, _EVENTS_SHA256), ["user_id", "item_id", "rating", "timestamp"])
    users = _table(_read(place, _USERS, _USERS_SHA256), ["user_id", "age", "gender", "occupation", "zip_code"])
    events = events.set_column(2, "rating", events.column("rating").cast(pa.float32()))
    rows = group_events(events, "user_id", [], str(place))
    at = pc.index_in(rows.column("user_id"), users.column("user_id"))
    for name in ("age", "gender", "occupation"):
        rows = rows.append_column(name, users.column(name).take(at))
    return table_rows(rows, read_rows, {"ml-100k": _EVENTS_SHA256[:16], "users": _USERS_SHA256[:16]}, f"ml-100k in {place}")


def fetch_wheel(cache: Path) -> Path:
    """Returns the wheel that carries ml-100k, downloading it once; two processes may do so at the same time.

    Raises:
        ValueError: when pip cannot download it, or it is not the known file.
    """
    wheel = cache / "recbole-1.2.1-py3-none-any.whl"
    if wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = next(Path(folder).glob("*.whl"), None)
        if done.returncode or found is None:
            got = (done.stderr.strip().splitlines() or ["nothing was downloaded"])[-1]
            todo = f"run `pip download --no-deps {WHEEL}` where there is a network and give the file with --path"
            raise problem("ml-100k cannot be downloaded", got=got, wanted="a wheel from pip", where=WHEEL, todo=todo)
        _check_hash(found.read_bytes(), WHEEL_SHA256, found)
        found.replace(wheel)  # in one step: another process sees the whole file or none
    return wheel


def _read(place: Path, names: tuple[str, ...], sha256: str) -> bytes:
    raw = _read_folder(place, names) if os.path.isdir(place) else _read_archive(place, names) if os.path.isfile(place) else None
    if raw is None:
        todo = "give --path a folder or an archive that holds one of them, or leave it out to download"
        raise problem("No ml-100k here", got="no such file", wanted=" or ".join(names), where=place, todo=todo)
    lines = raw.replace(b"\r\n", b"\n").replace(b"|", b"\t").strip()
    lines = lines.split(b"\n", 1)[1] if lines.startswith(b"user_id") and b"\n" in lines else lines
    _check_hash(lines, sha256, f"{place}, {names[0]} or {names[1]}")
    return lines


def _read_folder(place: Path, names: tuple[str, ...]) -> bytes | None:
    """Returns a file of one of these names in the folder, or up to three folders below it."""
    try:
        found = [path for name in names for depth in range(4) for path in sorted(place.glob("*/" * depth + name)) if path.is_file()]
    except OSError as error:  # such as a folder that goes while it is read
        raise problem("A folder cannot be read", got=error.strerror, wanted="a folder", where=error.filename, todo="mend --path") from None
    return read_small(found[0], what="A file of ml-100k", todo="mend --path") if found else None


def _read_archive(place: Path, names: tuple[str, ...]) -> bytes | None:
    """Returns a member of one of these names; nothing is unpacked, so that names and links in it lead nowhere."""
    try:
        with zipfile.ZipFile(place) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.filename)
            found = next((m for name in names for m in members if Path(m.filename).name == name and not m.is_dir()), None)
            if found is None:
                return None
            with archive.open(found) as file:
                content = file.read(_MOST_BYTES)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError) as error:
        wanted, todo = "a zip archive without password", "copy the archive again, or leave --path out to download"
        raise problem("The archive cannot be read", got=str(error) or "it ends early", wanted=wanted, where=place, todo=todo) from None
    return content


_MOST_BYTES = 16 << 20
"""The files of ml-100k have 2 MB; what an archive says to be larger is something else."""


def _check_hash(content: bytes, wanted: str, where: object) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        todo = "remove the file and fetch it again; another version can be prepared as CSV"
        raise problem("Not the known file", got=f"sha256 {found}", wanted=wanted, where=where, todo=todo)


def _table(lines: bytes, names: list[str]) -> pa.Table:
    return pv.read_csv(pa.BufferReader(lines), pv.ReadOptions(column_names=names), pv.ParseOptions(delimiter="\t"))


_MOVIELENS: dict[str, Any] = {
    "history": (
        FeatureRecipe("item_id", kind="id"),
        FeatureRecipe("rating", kind="number"),
        FeatureRecipe("timestamp", kind="time", gap="bucket"),
    ),
    "context": (FeatureRecipe("age", kind="number"), FeatureRecipe("gender", kind="id"), FeatureRecipe("occupation", kind="id")),
    "key": "user_id",
}
_SYNTHETIC: dict[str, Any] = {
    "history": (
        FeatureRecipe("item_id", kind="id"),
        FeatureRecipe("dwell", kind="number", transform="log"),
        FeatureRecipe("timestamp", kind="time", gap="bucket"),
    ),
    "context": (
        FeatureRecipe("segment", kind="id"),
        FeatureRecipe("age", kind="number"),
        FeatureRecipe("requested_at", kind="time"),
    ),
    "label": "label",
    "key": "user_id",
}
