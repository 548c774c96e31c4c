"""Counts lines of code, files, and names that the style forbids.

    python scripts/count_code.py [--at COMMIT] [--names] [--json F]

A line counts if it has a token of code; blank lines, comments and docstrings do not
count. A bare participle is a function name of one word, such as ``asked`` or ``found``,
that names neither what the function does nor what it returns.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("autopar", "passes", "solver")
SHORT = 40
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.ENCODING,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Participles that do not end in -ed.
_IRREGULAR = frozenset(
    [
        "begun",
        "bought",
        "bound",
        "brought",
        "built",
        "caught",
        "chosen",
        "cut",
        "done",
        "drawn",
        "dealt",
        "fed",
        "felt",
        "found",
        "given",
        "gone",
        "got",
        "grown",
        "had",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "led",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "put",
        "read",
        "run",
        "said",
        "seen",
        "sent",
        "set",
        "shown",
        "sought",
        "spent",
        "split",
        "spread",
        "stood",
        "taken",
        "taught",
        "told",
        "thought",
        "understood",
        "won",
        "written",
    ]
)
# Nouns and verbs that have the form of a participle.
_NO_PARTICIPLES = frozenset(
    {"bed", "embed", "exceed", "feed", "need", "proceed", "read", "run"}
    | {"seed", "set", "split", "cut", "put", "speed", "spread"}
)


@dataclasses.dataclass
class Count:
    """The counts of some files.

    Attributes:
      lines: lines of code, by part of the project.
      files: number of files, by part of the project.
      short: files with fewer than `SHORT` lines.
      participles: functions whose name is a bare participle.
      classes: name of a class -> the places where it is defined.
    """

    lines: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter[str]
    )
    files: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter[str]
    )
    short: list[str] = dataclasses.field(default_factory=list[str])
    participles: list[str] = dataclasses.field(default_factory=list[str])
    classes: dict[str, list[str]] = dataclasses.field(
        default_factory=dict[str, list[str]]
    )

    def add(self, path: str, source: str) -> None:
        """Adds the counts of a file."""
        tree = ast.parse(source)
        room = "/".join(pathlib.PurePath(path).parts[:2])
        if room.startswith(("passes", "solver")):
            room = "/".join(pathlib.PurePath(path).parts[:3])
        self.lines[room] += code_lines(source, tree)
        self.files[room] += 1
        length = source.count("\n")
        if length < SHORT and not path.endswith(("__init__.py", "__main__.py")):
            self.short.append(f"{path} ({length})")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, []).append(path)
            elif isinstance(node, ast.FunctionDef) and is_participle(node.name):
                self.participles.append(f"{path}: {node.name}")

    @property
    def twice(self) -> dict[str, list[str]]:
        """The class names that occur more than once."""
        return {n: paths for n, paths in self.classes.items() if len(paths) > 1}


def is_participle(name: str) -> bool:
    """Whether a name consists of a single participle."""
    word = name.strip("_")
    if "_" in word or word in _NO_PARTICIPLES:
        return False
    return word in _IRREGULAR or (word.endswith("ed") and len(word) > 3)


def code_lines(source: str, tree: ast.Module) -> int:
    """The number of lines with code."""
    docstrings = set(_docstring_lines(tree))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and ast.get_docstring(node, clean=False):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def files_at(commit: str | None) -> Iterable[tuple[str, str]]:
    """The paths and texts of the project's own modules.

    Args:
      commit: the commit; None: the files on disk.
    """
    if commit is None:
        for folder in SOURCES:
            for path in sorted((ROOT / folder).rglob("*.py")):
                yield path.relative_to(ROOT).as_posix(), path.read_text()
        return
    listed = _git("ls-tree", "-r", "--name-only", commit, *SOURCES).split("\n")
    for path in listed:
        if path.endswith(".py"):
            yield path, _git("show", f"{commit}:{path}")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", help="a commit; else the files on the disk")
    parser.add_argument("--names", action="store_true", help="print each name, too")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    given = parser.parse_args()
    count = Count()
    for path, source in files_at(given.at):
        count.add(path, source)
    for room, lines in count.lines.most_common():
        print(f"{lines:7,} {count.files[room]:4} {room}")
    figures = {
        "command": f"python scripts/count_code.py --at {given.at or 'the disk'}",
        "lines": sum(count.lines.values()),
        "files": sum(count.files.values()),
        "short_files": len(count.short),
        "participles": len(count.participles),
        "class_names_twice": len(count.twice),
        "rooms": dict(count.lines.most_common()),
    }
    for name in ("lines", "files", "short_files", "participles", "class_names_twice"):
        print(f"{name}: {figures[name]:,}")
    if given.names:
        print(*count.short, *count.participles, sep="\n")
        print(*(f"{n}: {', '.join(p)}" for n, p in count.twice.items()), sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
