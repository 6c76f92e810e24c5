"""Run directories whose files are not what the run wrote, for `evaluate`, `report`, `plan` and `train --resume`."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

from tests.fuzz.case import Case, Expect, Ground, Room
from tests.fuzz.values import ODD_YAML

FILES = ["config.yaml", "schema.yaml", "vocabularies.yaml", "metrics.jsonl", "result.json", "cost.json"]
READ_BY = {
    "evaluate": ("config.yaml", "schema.yaml", "cost.json"),
    "report": ("metrics.jsonl", "result.json"),
    "resume": ("result.json", "cost.json"),
    "plan": ("config.yaml", "cost.json"),
}


def draw_run(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a run directory."""
    run = room.out / "run"
    shutil.copytree(ground.run, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(ground.run), str(run)))
    good = room.given / "good.yaml"
    good.write_text(config.read_text())
    command = r.choice(["evaluate", "evaluate", "report", "report", "resume", "plan"])
    name = r.choice(FILES)
    told, expect = _change(r, run / name)
    if name not in READ_BY[command]:
        expect = "any"
    words = {
        "evaluate": ["evaluate", str(run)],
        "report": ["report", str(run)],
        "resume": ["train", "--config", str(good), "--resume", "--train.max_steps=4", "--train.num_epochs=2"],
        "plan": ["plan", str(config), "--planner-seconds=0"],
    }[command]
    if name == "cost.json":
        expect = "any"
    return Case("run", f"{command}, {name}: {told}", words, expect, names=(name, "result", "metrics") if expect == "refused" else ())


def _change(r: random.Random, path: Path) -> tuple[str, Expect]:
    content = path.read_bytes() if path.exists() else b'{"cost": [1.0, 0.0, 0.0], "model": {}, "device": "cpu"}'
    text = content.decode()
    how = r.choice(
        [
            "missing",
            "empty",
            "half",
            "folder",
            "pipe",
            "bytes",
            "utf-16",
            "list",
            "null",
            "number",
            "text",
            "value",
            "value",
            "value",
            "line gone",
            "line doubled",
            "deep",
            "link",
            "zeros",
        ]
    )
    path.unlink(missing_ok=True)
    if how == "missing":
        return how, "any"
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how in ("link", "zeros"):
        path.symlink_to("nowhere" if how == "link" else "/dev/zero")
    else:
        made = {
            "empty": b"",
            "half": content[: len(content) // 2],
            "bytes": r.randbytes(200),
            "utf-16": text.encode("utf-16"),
            "list": b"[1, 2]\n",
            "null": b"null\n",
            "number": b"3\n",
            "text": b'"x"\n',
            "deep": b"[" * 50_000 + b"]" * 50_000,
        }
        path.write_bytes(made.get(how) or _edit(r, text, how).encode(errors="surrogatepass"))
    return how, "refused" if how in ("folder", "pipe", "bytes", "utf-16", "list", "number", "text", "deep", "zeros") else "any"


def _edit(r: random.Random, text: str, how: str) -> str:
    lines = text.splitlines()
    if not lines:
        return text
    i = r.choice([i for i, line in enumerate(lines) if "cache" not in line and "run_dir" not in line])
    if how == "line gone":
        del lines[i]
    elif how == "line doubled":
        lines.insert(i, lines[i])
    else:
        odd = r.choice(["null", '"x"', "[]", "{}", "-1", "1e999", "NaN", "Infinity", "true", *ODD_YAML[:30]])
        found = list(re.finditer(r":\s*([^,{}\[\]\n]+)", lines[i]))
        if found:
            at = r.choice(found)
            lines[i] = lines[i][: at.start(1)] + odd + lines[i][at.end(1) :]
    return "\n".join(lines) + "\n"
