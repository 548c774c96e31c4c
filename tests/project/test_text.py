"""Tests the project's files: no machine paths, nothing unfinished, no long modules."""

import re
from pathlib import Path

import checkout
import pytest

# Brackets keep the patterns from matching themselves.
MACHINE_PATH = re.compile(r"/(?:hom[e]|roo[t]|wor[k]|User[s])/|fil[e]:///|\b[C]:\\")
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b|raise NotImplemented[E]rror")
LONGEST_MODULE = 800
SOURCES = list(checkout.files(".py"))
# Files by others, which are kept unchanged.
FOREIGN = {"LICENSE", "requirements.lock"}


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in checkout.files():
        data = path.read_bytes()
        if path.name not in FOREIGN and b"\0" not in data:
            found.append((path, data.decode()))
    return found


@pytest.mark.parametrize(
    "pattern", [MACHINE_PATH, UNFINISHED], ids=["machine path", "unfinished"]
)
def test_no_text_has(pattern: re.Pattern[str]) -> None:
    hits = [
        f"{checkout.relative(path)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]

    assert hits == []


@pytest.mark.parametrize(
    "line", ["see /hom" + "e/me/x", "/roo" + "t/.cache", "TOD" + "O: more"]
)
def test_patterns_match_what_they_should(line: str) -> None:
    assert MACHINE_PATH.search(line) or UNFINISHED.search(line)


def test_the_lock_names_no_machine_and_no_index() -> None:
    lock = (checkout.ROOT / "requirements.lock").read_text()

    assert not MACHINE_PATH.search(lock)
    assert not re.search(r"index-url|find-links|https?://|@ ", lock)


def test_modules_are_short() -> None:
    lengths = {
        checkout.relative(path): len(path.read_text().splitlines()) for path in SOURCES
    }

    assert {p: n for p, n in lengths.items() if n > LONGEST_MODULE} == {}
