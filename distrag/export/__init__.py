"""run -> served model: one file that plain modules load, without ranks, a process group or the run."""

from __future__ import annotations

from distrag.export.model import load_model
from distrag.export.write import export_run

__all__ = ["export_run", "load_model"]
