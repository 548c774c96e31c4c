"""Compares a text with a golden file, or rewrites the file.

``make golden`` sets ``AUTOPAR_UPDATE_GOLDEN=1``, with which tests rewrite the files.
Review the difference like code.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from checkout import GOLDEN

UPDATE = "AUTOPAR_UPDATE_GOLDEN"
# A longer difference would not help the reader.
MOST_LINES = 80


def assert_golden(text: str, name: str) -> None:
    """Checks that a file in ``tests/golden`` contains a text and a final newline."""
    path = GOLDEN / name
    if os.environ.get(UPDATE):
        _write(path, text + "\n")
    assert path.exists(), f"no golden file {name}; `make golden` writes it."
    kept = path.read_text(encoding="utf-8")
    if text + "\n" != kept:
        before, after = kept.splitlines(), text.splitlines()
        lines = list(difflib.unified_diff(before, after, name, "now", "", "", 1, ""))
        shown = "\n".join(lines[:MOST_LINES])
        raise AssertionError(f"`make golden` writes {name} anew; it differs:\n{shown}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
