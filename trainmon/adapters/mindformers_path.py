"""Where MindFormers' ``auto_register`` finds ``trainmon_mf``; told without importing MindFormers."""

from __future__ import annotations

from pathlib import Path

__all__ = ["register_path"]


def register_path() -> str:
    """The folder for ``REGISTER_PATH`` or ``run_mindformer.py --register_path``."""
    return str(Path(__file__).parent / "mindformers" / "register")
