"""The scripts, run for real in a small tree of their own whose package needs nothing, so that no index is asked."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "0.1"

[tool.ruff]
line-length = 100
"""

BACKEND = """
import pathlib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "tiny-0.1-py3-none-any.whl", "tiny-0.1.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\\n" for extra in ("cpu", "cuda", "test"))
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: tiny\\nVersion: 0.1\\n{extras}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: tiny\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


class Tree:
    """A clone in miniature: launch/, a pyproject, and a PATH whose first folder says what machine this is."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a tree with spaces"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.first_runs: list[tuple[int, str]] = []
        shutil.copytree(LAUNCH, self.root / "launch")
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "backend.py").write_text(BACKEND)
        self.script(self.bin / "python3.13", "echo 'this is a shim, there is no such version' >&2; exit 127")
        self.has_gpu(False)

    def script(self, path: Path, body: str) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def has_gpu(self, answer: bool) -> None:
        self.script(self.bin / "nvidia-smi", "echo 'GPU 0: a card'" if answer else "exit 9")

    def start(self, script: str = "setup.sh", **environment: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "ACCELERATOR")}
        kept |= {"PATH": f"{self.bin}:{kept['PATH']}", **environment}
        command = [str(self.root / "launch" / script)]
        return subprocess.Popen(
            command, cwd="/", env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, script: str = "setup.sh", **environment: str) -> tuple[int, str]:
        return finish(self.start(script, **environment))

    def stamp(self) -> str:
        return (self.root / ".venv" / "distrag-stamp").read_text().split(" ")[0]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """A tree whose first set-up was killed half-way and whose second and third ran side by side."""
    tree = Tree(tmp_path_factory.mktemp("launch"))
    killed = tree.start()
    while not (tree.root / ".venv" / "bin").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    tree.first_runs = [finish(process) for process in (tree.start(), tree.start())]
    yield tree
    shutil.rmtree(tree.root)


def test_a_killed_installation_is_made_again_by_one_of_two_that_run_side_by_side(tree: Tree) -> None:
    outputs = tree.first_runs
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert sum("making .venv for cpu" in text for _, text in outputs) == 1
    assert sum("an installation that did not end" in text for _, text in outputs) == 1
    assert sum("another setup is at work" in text for _, text in outputs) == 1
    assert subprocess.run([tree.root / ".venv/bin/python", "-m", "pip", "show", "-q", "tiny"], check=False).returncode == 0


def test_a_second_run_says_nothing_and_a_changed_lint_rule_costs_nothing(tree: Tree) -> None:
    assert tree.run() == (0, "")
    (tree.root / "pyproject.toml").write_text(PYPROJECT.replace("100", "120"))
    assert tree.run() == (0, "")


def test_a_python_that_does_not_run_is_refused_by_name(tree: Tree) -> None:
    code, text = tree.run(PYTHON="/no/such/python")
    assert code == 1
    assert "/no/such/python" in text


def test_an_unknown_accelerator_is_refused(tree: Tree) -> None:
    code, text = tree.run(ACCELERATOR="abacus")
    assert code == 1
    assert "'abacus'" in text
    assert "cpu or cuda" in text


def test_a_step_that_fails_is_named_at_the_end_and_stops_no_other(tree: Tree) -> None:
    tools = tree.root / ".venv" / "bin"
    for name in ("ruff", "lint-imports"):
        tree.script(tools / name, "exit 0")
    tree.script(tools / "mypy", "echo 'one error'; exit 1")
    tree.script(tree.root / "launch" / "quickstart.sh", 'echo "quickstart $*"')
    code, text = tree.run("test.sh")
    assert code == 1
    assert re.search(r"^types .*FAILED +\d+ s$", text, re.M)
    assert re.search(r"^quickstart.* ok +\d+ s$", text, re.M)
    assert "FAILED: types (mypy --strict)\nFAILED: tests (pytest)\n" in text  # the small tree has no pytest
    assert "all steps passed" not in text


def test_a_gpu_that_appears_asks_for_another_environment(tree: Tree) -> None:
    assert tree.stamp() == "cpu"
    tree.has_gpu(True)
    code, text = tree.run()
    assert code == 0, text
    assert "made for something else (cpu" in text
    assert tree.stamp() == "cuda"
    assert tree.run() == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_strict_and_executable(script: Path) -> None:
    text = script.read_text()
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_torchrun_is_started_with_a_store_for_each_attempt_wherever_it_is_started() -> None:
    texts = {path.name: path.read_text() for path in LAUNCH.rglob("*") if path.is_file()}
    starters = {name for name, text in texts.items() if re.search(r"^\s*(exec )?torchrun ", text, re.M)}
    assert "quickstart.sh" in starters
    assert not {name for name in starters if "\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" not in texts[name]}
