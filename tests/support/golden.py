"""Compares a text with a golden file, or writes the file anew.

``make golden`` writes: it sets ``AUTOPAR_UPDATE_GOLDEN=1``. Review the difference like
code.
"""

from __future__ import annotations

import os
from pathlib import Path

from checkout import GOLDEN

UPDATE = "AUTOPAR_UPDATE_GOLDEN"


def assert_golden(text: str, name: str) -> None:
    """Checks that a file in ``tests/golden`` holds a text and a newline."""
    path = GOLDEN / name
    if os.environ.get(UPDATE):
        _write(path, text + "\n")
    assert path.exists(), f"no golden file {name}; `make golden` writes it."
    assert text + "\n" == path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
