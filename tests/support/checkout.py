"""Lists the files of the checkout for the tests of the project."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SOURCES = {
    "autopar": ROOT / "autopar",
    "autopar_errors": ROOT / "autopar_errors",
    "autopar_passes": ROOT / "passes" / "autopar_passes",
    "autopar_solver": ROOT / "solver" / "autopar_solver",
}
# Folders that tools create, and nobody writes.
_MADE = {"build", "dist", "node_modules"}


def files(*suffixes: str) -> Iterator[Path]:
    """Every hand-written file, or those with one of the suffixes, in sorted order."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = sorted(name for name in subfolders if not _made(name))
        for name in sorted(names):
            if name != ".git" and (not suffixes or name.endswith(suffixes)):
                yield Path(folder, name)


def modules() -> dict[str, Path]:
    """The files of the packages by the names under which they are imported."""
    found = {}
    for package, source in SOURCES.items():
        for path in sorted(source.rglob("*.py")):
            inner = path.relative_to(source).with_suffix("").parts
            name = ".".join((package, *inner))
            found[name.removesuffix(".__init__")] = path
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _made(folder: str) -> bool:
    hidden = folder.startswith((".", "__")) and folder != ".ci"
    return hidden or folder in _MADE or folder.endswith(".egg-info")
