"""What import-linter cannot see: imports of parts of other packages, the environment, names and sizes of files."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "distrag").rglob("*.py"))
SHARDING = {"distrag/world.py", "distrag/embedding/plan.py", "distrag/embedding/planner.py", "distrag/parallel.py"}
SHARDING |= {"distrag/checkpoint/board.py", "distrag/checkpoint/tensors.py"}
SHARDING |= {"distrag/cluster/agent.py"}  # which is torchrun, and no rank
ENVIRONMENT = {"distrag/world.py"}
TOP = {"pyproject.toml", "distrag", "launch", "tests", "configs", "README.md"}
VAGUE = {"utils", "common", "helpers", "base", "core"}


def names_used(source: str) -> set[str]:
    """Returns every dotted name that `source` imports or reads as an attribute of an import, aliases resolved."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            aliases |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            used |= set(full.values())
            aliases |= full
    return used | {_resolve(node, aliases) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _resolve(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_resolve(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def users_of(*prefixes: str) -> set[str]:
    """Returns the files of the package that use a name equal to or below one of `prefixes`."""
    hits = {
        path for path in FILES for name in names_used(path.read_text()) if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
    }
    return {path.relative_to(ROOT).as_posix() for path in hits}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.optim import _apply_optimizer_in_backward",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\ndef f():\n    return t.distributed.get_rank()",
    ],
)
def test_every_way_of_using_a_part_of_a_package_is_seen(source: str) -> None:
    assert any(f"{name}.".startswith("torch.distributed.") for name in names_used(source))


def test_only_the_sharding_files_use_torch_distributed() -> None:
    assert users_of("torch.distributed", "torchrec.distributed") <= SHARDING


def test_only_world_reads_the_environment() -> None:
    assert users_of("os.environ", "os.environb", "os.getenv", "os.putenv") <= ENVIRONMENT


def test_no_room_has_a_name_that_says_nothing() -> None:
    assert not {path.relative_to(ROOT).as_posix() for path in FILES if VAGUE & {path.stem, *path.relative_to(ROOT).parent.parts}}


def test_every_room_is_a_package() -> None:
    """A folder without __init__.py would escape import-linter."""
    assert not {path.parent.relative_to(ROOT).as_posix() for path in FILES if not (path.parent / "__init__.py").exists()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_readable(path: Path) -> None:
    source = path.read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {node.name: lines for node in functions if (lines := _code_lines(node)) > 60}
    assert len(source.splitlines()) <= 400


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    said = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - said


def test_the_top_level_holds_what_the_readme_draws() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git clone")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP
