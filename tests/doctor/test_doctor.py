"""`distrag doctor` on this machine, and on machines made ill: each fault is found, named, and answered with a remedy."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.runs import config, write_histories

FBGEMM = "fbgemm answers, cpu"
EXCHANGE = "2 ranks, gloo"


def examine(*words: str, before: str = "", path: Path | None = None, limit_s: float = 100) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns the exit code of `distrag doctor --json` and its lines by name.

    Args:
        words: of the command.
        before: shell words before it, such as a ulimit.
        path: a folder whose packages come before all others.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(path or ""), os.environ.get("PYTHONPATH", ""))))}
    command = ["bash", "-c", f'{before}exec "$@"', "-", sys.executable, "-m", "distrag", "doctor", "--json", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["healthy"] == (done.returncode == 0)
    for line in told["lines"]:
        assert line["told"]
        assert bool(line["todo"]) == (line["state"] != "ok"), line
    return done.returncode, {line["name"]: line for line in told["lines"]}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Returns the file of a config whose store lies beside it."""
    store = write_histories(tmp_path / "store")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config(store, tmp_path / "run")))
    return tmp_path / "c.yaml"


def test_a_healthy_machine_has_no_problem(written: Path) -> None:
    code, lines = examine("--config", str(written))
    assert code == 0, [line for line in lines.values() if line["state"] == "problem"]
    for name in ("Python", "torch", "torchrec", "torchx", "fbgemm build", "cores", "memory", "/dev/shm", FBGEMM, EXCHANGE):
        assert lines[name]["state"] in ("ok", "warning")
    assert "120 samples" in lines["config and store"]["told"]
    assert lines["run folder"]["state"] == "ok"
    assert not (written.parent / "run").exists(), "it only looks"


def test_text_names_every_state(written: Path) -> None:
    command = [sys.executable, "-m", "distrag", "doctor", "--config", str(written), "--data.path", str(written.parent / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "ok       Python" in done.stdout
    found = done.stdout.index("problem  config and store")
    assert "No store here" in done.stdout[found:]
    assert "-> give the folder that `distrag prepare ... --out` wrote" in done.stdout[found:]
    assert done.stdout.rstrip().endswith("1 problem, 0 warnings") or "1 problem, " in done.stdout
    assert not done.stderr


def test_words_of_a_config_without_one_are_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "distrag", "doctor", "--jsn"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--jsn" in done.stderr


def _distribution(folder: Path, name: str, version: str, needs: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    (info / "METADATA").write_text(text)


def test_an_fbgemm_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    code, lines = examine(path=tmp_path)
    assert code == 1
    assert "libcuda.so.1" in lines[FBGEMM]["told"]


def test_an_fbgemm_that_crashes_takes_only_its_own_process_down(tmp_path: Path) -> None:
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    code, lines = examine(path=tmp_path)
    assert code == 1
    assert "SIGSEGV" in lines[FBGEMM]["told"]
    assert lines["torch imports"]["state"] == "ok"


@pytest.mark.parametrize(
    ("made", "name", "told"),
    [
        ({"fbgemm-gpu": "1.6.0"}, "fbgemm-gpu", "1.6.0, distrag was built on ==1.8.0"),
        ({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "fbgemm build", "both wheels"),
        ({"torch": "2.13.0+cu130"}, "fbgemm build", "the CPU build beside a torch with CUDA"),
        ({"torch": "2.9.1"}, "torch", "2.9.1, distrag was built on ==2.13.*"),
        ({"torchmetrics": "1.8.0"}, "torchmetrics", "torchrec needs ==1.0.3"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_packages_that_do_not_fit(tmp_path: Path, made: dict[str, str], name: str, told: str) -> None:
    for each, version in made.items():
        _distribution(tmp_path, each, version)
    code, lines = examine(path=tmp_path)
    assert code == 1
    assert lines[name]["state"] == "problem"
    assert told in lines[name]["told"]


def test_a_store_that_was_altered(written: Path) -> None:
    file = next(path for path in (written.parent / "store").iterdir() if path.suffix != ".yaml")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, lines = examine("--config", str(written))
    assert code == 1
    assert str(written.parent / "store") in lines["config and store"]["told"]


def test_a_config_that_cannot_be_read(written: Path) -> None:
    code, lines = examine("--config", str(written), "--optim.lr", "fast")
    assert code == 1
    assert "optim.lr" in lines["config and store"]["told"]


def test_a_run_folder_that_another_run_holds(written: Path) -> None:
    (written.parent / "run").mkdir()
    with (written.parent / "run" / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, lines = examine("--config", str(written))
    assert code == 1
    assert "Another run is at work" in lines["run folder"]["told"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small disk needs root and unshare")
def test_a_full_disk(written: Path) -> None:
    small = written.parent / "small"
    small.mkdir()
    before = f"mount -t tmpfs -o size=1m none {small} && head -c 1200000 /dev/zero >{small}/full 2>/dev/null; "
    command = [sys.executable, "-m", "distrag", "doctor", "--json", "--config", str(written), "--train.run_dir", str(small / "run")]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f'{before} exec "$@"', "-", *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert "No space left on device" in lines["run folder"]["told"]
    assert "free the disk" in lines["run folder"]["todo"]


def test_few_open_files() -> None:
    code, lines = examine(before="ulimit -n 64; ")
    assert code == 1
    assert lines["ulimit, open files"]["state"] == "problem"
    assert "ulimit -n 1024" in lines["ulimit, open files"]["todo"]


def test_nothing_is_left_running(written: Path) -> None:
    examine("--config", str(written))
    left = subprocess.run(["pgrep", "-f", "distrag.doctor.child"], capture_output=True, text=True, check=False)
    assert not left.stdout
