"""Archives and folders for `prepare ml-100k --path`: names that lead out, members that lie, bombs."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable

from tests.fuzz.case import Case, Ground, Room
from tests.fuzz.source_csv import make_special

Fill = Callable[[zipfile.ZipFile], object]


def _link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("u.data")
    info.external_attr = 0o120777 << 16
    archive.writestr(info, "/etc/passwd")


MEMBERS: dict[str, Fill] = {
    "other files": lambda a: a.writestr("readme", "x"),
    "path upwards": lambda a: [a.writestr(f"../../../../tmp/{name}", "1\t2\t3\t4\n") for name in ("u.data", "u.user")],
    "absolute path": lambda a: a.writestr("/etc/u.data", "1\t2\t3\t4\n"),
    "link": _link,
    "bomb": lambda a: a.writestr("u.data", bytes(400 << 20)),
    "folder of that name": lambda a: a.writestr("u.data/", ""),
    "nothing": lambda _: None,
}
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def _set(raw: bytearray, places: dict[bytes, int], value: bytes) -> bytearray:
    for mark, offset in places.items():
        at = raw.index(mark) + offset
        raw[at : at + len(value)] = value
    return raw


SPOIL: dict[str, Callable[[bytearray], bytearray]] = {
    "half": lambda raw: raw[: len(raw) // 2],
    "no zip": lambda raw: bytearray(b"x" * len(raw)),
    "encrypted": lambda raw: _set(raw, {_LOCAL: 6, _CENTRAL: 8}, b"\x01"),
    "wrong sum": lambda raw: _set(raw, {_LOCAL: 40}, b"\xff\xff"),
    "unknown method": lambda raw: _set(raw, {_LOCAL: 8, _CENTRAL: 10}, b"\x63"),
    "lying size": lambda raw: _set(raw, {_CENTRAL: 24}, b"\xfe\xff\xff\xff"),
    "lying offset": lambda raw: _set(raw, {_CENTRAL: 42}, b"\xff\xff\xff\x7f"),
    "parquet by its bytes": lambda raw: bytearray(b"PAR1") + raw,
    "right but for the content": lambda raw: raw,
}
IN_FOLDER = ("folder", "pipe", "device", "dangling link", "link out", "nothing")
AS_ARCHIVE = ("pipe", "device", "link to itself", "missing")


def draw_archive(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of an archive or a folder that should hold ml-100k and does not."""
    how = r.choices(["members", "bytes", "folder", "special"], [4, 5, 3, 2])[0]
    path = room.given / ("x" if how == "folder" else "x.zip")
    told = r.choice(sorted({"members": MEMBERS, "bytes": SPOIL, "folder": IN_FOLDER, "special": AS_ARCHIVE}[how]))
    if how == "folder":
        path.mkdir()
        if told == "link out":
            (path / "u.data").symlink_to("/etc/passwd")
        elif told != "nothing":
            make_special(path / "u.data", told)
    elif how == "special":
        if told != "missing":
            make_special(path, told)
    else:
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
            MEMBERS.get(told, lambda a: a.writestr("u.data", "1\t2\t3\t4\n" * 50))(archive)
        path.write_bytes(bytes(SPOIL.get(told, lambda raw: raw)(bytearray(memory.getvalue()))))
    words = ["prepare", "ml-100k", "--path", str(path), "--out", str(room.out / "store")]
    return Case("source", f"archive, {how}: {told}", words, "refused", names=(path.name,))
