"""Which packages are installed, and whether they fit together, from what pip wrote down; nothing is imported."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distrag.doctor.line import Line

_INSTALL = "make a new environment with ./launch/setup.sh, or pip install distrag with one of its extras [cpu] and [cuda]"
_PINNED = ("torch", "torchrec", "torchx", "fbgemm-gpu")
_PYTHON = SpecifierSet(">=3.11,<3.14")


def check_python() -> Line:
    """Returns whether this Python is one that distrag runs on."""
    told = f"{platform.python_version()} at {sys.executable}"
    if platform.python_version() in _PYTHON:
        return Line("Python", "ok", told)
    return Line("Python", "problem", told, f"make an environment with Python {_PYTHON}")


def check_packages() -> list[Line]:
    """Returns a line for each package whose version decides whether a run works, against what distrag's own metadata asks for."""
    wanted = {each.name: each.specifier for each in map(Requirement, requires("distrag") or []) if each.specifier}
    lines = [_package(name, wanted.get(name, SpecifierSet())) for name in _PINNED]
    return [*lines, _fbgemm_builds(), *_others(wanted)]


def _package(name: str, wanted: SpecifierSet) -> Line:
    found = _version(name)
    if found is None:
        return Line(name, "problem", "not installed", _INSTALL)
    if not wanted.contains(found, prereleases=True):
        return Line(name, "problem", f"{found}, distrag was built on {wanted}", f"pip install '{name}{wanted}', or {_INSTALL}")
    return Line(name, "ok", found)


def _fbgemm_builds() -> Line:
    """Both wheels of fbgemm write the same files: the one installed last has won, and the shim that stands for the other has no files."""
    cpu, either = _version("fbgemm-gpu-cpu"), _version("fbgemm-gpu")
    torch = _version("torch") or ""
    has_shim = any(each.startswith("fbgemm-gpu-cpu") for each in _requires("fbgemm-gpu"))
    builds = f"fbgemm-gpu {either or 'missing'}{' (the shim)' if has_shim else ''}, fbgemm-gpu-cpu {cpu or 'missing'}, torch {torch}"
    if cpu and either and not has_shim:
        return Line("fbgemm build", "problem", f"both wheels, which own the same files: {builds}", _INSTALL)
    if cpu and cpu != either:
        return Line("fbgemm build", "problem", f"two versions: {builds}", _INSTALL)
    if not cpu and "+cpu" in torch:
        return Line("fbgemm build", "problem", f"the CUDA build beside a torch without CUDA: {builds}", _INSTALL)
    if cpu and "+cu" in torch:
        return Line("fbgemm build", "problem", f"the CPU build beside a torch with CUDA: {builds}", _INSTALL)
    return Line("fbgemm build", "ok", builds)


def _others(wanted: dict[str, SpecifierSet]) -> list[Line]:
    """Returns the packages below those, where torchrec or torchx asks for another version than is installed."""
    lines = []
    for parent in ("torchrec", "torchx"):
        for each in map(Requirement, _requires(parent)):
            found = _version(each.name)
            if each.marker and not each.marker.evaluate({"extra": ""}):
                continue
            if each.name not in _PINNED and (found is None or not each.specifier.contains(found, prereleases=True)):
                todo = f"pip install '{each.name}{each.specifier}'"
                lines.append(Line(f"{each.name}", "problem", f"{found or 'not installed'}, {parent} needs {each.specifier or 'it'}", todo))
    return lines


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []
