"""Draws sentences of the project's prose, for a reader to judge.

    python scripts/draw_sentences.py --seed 1 --count 40

The sentences are those of docstrings, comments, the README and the pages in docs.
Headings, tables, blocks of code, and sentences with fewer than six words are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import random
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("autopar", "autopar_errors", "passes", "solver")
LEAST_WORDS = 6
_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"')*]*\s+(?=[\"'(*`\[]*[A-Z`])")
# Headings, tables, examples, fences, HTML, and the titles of a docstring's sections.
_NO_PROSE = re.compile(r"\||#|>>>|\.\.\.|```|!!!|<|[A-Z]\w+:$")
# The mark of an item of a list, or the name that a docstring explains.
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.|[\w`*]+:)\s+")


def sentences(lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Yields the sentences in lines of prose, each with the first line of its
    paragraph.
    """
    start, paragraph, is_code, is_example = first, list[str](), False, False
    for number, line in enumerate([*lines, ""], first):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_example = bool(line.strip()) and (is_example or line.lstrip()[:3] == ">>>")
        is_indented = line.startswith("    ") and not paragraph
        leaves = is_fence or is_code or is_example or is_indented
        leaves = leaves or _NO_PROSE.match(line.strip())
        if paragraph and (leaves or not line.strip() or _ITEM.match(line)):
            for text in _END.split(" ".join(paragraph)):
                if len(text.split()) >= LEAST_WORDS and text[-1] in ".!?)*`":
                    yield start, text
            paragraph = []
        if line.strip() and not leaves:
            start = start if paragraph else number
            paragraph.append(_ITEM.sub("", line).strip())


def python_sentences(source: str) -> Iterator[tuple[int, str]]:
    """The sentences of a module's docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield from sentences(text.splitlines(), node.body[0].lineno)
    comment, start = list[str](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != start + len(comment):
                yield from sentences(comment, start)
                comment = []
            start = start if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
    yield from sentences(comment, start)


def all_sentences() -> Iterator[tuple[str, int, str]]:
    """Each sentence of the project, with its file and its line."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        path = file.relative_to(ROOT).as_posix()
        for line, text in sentences(file.read_text().splitlines(), 1):
            yield path, line, text
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            for line, text in python_sentences(file.read_text()):
                yield path, line, text


def main() -> None:
    """Prints the sentences, numbered."""
    parser = argparse.ArgumentParser(description="Draws sentences of the prose.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    given = parser.parse_args()
    every = list(all_sentences())
    for number, (path, line, text) in enumerate(
        random.Random(given.seed).sample(every, given.count), 1
    ):
        print(f"{number:3}. {path}:{line}\n     {text}")
    print(f"of {len(every):,} sentences")


if __name__ == "__main__":
    sys.exit(main())
