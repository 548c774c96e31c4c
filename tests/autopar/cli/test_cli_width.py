"""Tests that tables and sentences fit the terminal's width without losing words."""

from __future__ import annotations

import re

import pytest
from command_line import SMALL, TARGET, Run

COMMANDS = {
    "plan": ("plan", TARGET, *SMALL, "--cluster", "2x4:h100"),
    "compare": ("compare", TARGET, *SMALL, "--cluster", "2x4:h100"),
    "sweep": ("sweep", TARGET, *SMALL[::2], "batch=64,7", *("--cluster", "4:cpu")),
}


@pytest.mark.parametrize(
    ("command", "width"), [("plan", 60), ("plan", 40), ("compare", 40), ("sweep", 60)]
)
def test_lines_fit(
    command: str, width: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = COMMANDS[command]
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run(*words).out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = run(*words).out

    assert max(map(len, whole.splitlines())) > width
    assert max(map(len, narrow.splitlines())) <= width
    # Words may be broken behind a slash or a comma, and headings come again.
    assert pieces(whole) - pieces(narrow) == set()


def pieces(text: str) -> set[str]:
    """The parts of words between possible line breaks, without seconds of planning."""
    kept = [x for x in text.splitlines() if "planned in" not in x]
    return set(re.findall(r"[^\s/,]+", " ".join(kept).split("graph ")[0]))


def test_a_long_reason_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last column of a table never makes lines of hundreds of letters."""
    monkeypatch.delenv("COLUMNS", raising=False)
    out = run(*COMMANDS["sweep"], "--axis-names", "data", "--max-axes", "1").out

    assert "…" in out
    assert max(map(len, out.splitlines())) < 200
