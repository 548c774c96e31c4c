"""Tests that the functions and calls that docs/architecture.md names exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import checkout
import pytest

PAGE = (checkout.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_HOPS = 10
NAME = re.compile(r"`(autopar(?:_passes|_solver)?(?:\.\w+)+)`")
CARRIED = re.compile(r"^\s*The \w+ carries `(\w+)`\.$", re.M)


@dataclasses.dataclass(frozen=True)
class Hop:
    """One numbered step of a list: its functions, and the data that it passes on."""

    number: int
    names: tuple[str, ...]
    carried: str | None


@dataclasses.dataclass(frozen=True)
class Found:
    """A function or class that the page names, and the module that defines it."""

    target: Any
    module: Any

    @functools.cached_property
    def tree(self) -> ast.AST:
        source = inspect.getsource(inspect.unwrap(self.target))
        return ast.parse(textwrap.dedent(source))


def ways() -> dict[str, list[Hop]]:
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    titles = {text.partition("\n")[0]: text for text in sections}
    return {t: hops(text) for t, text in titles.items() if t.startswith("The way of")}


def hops(section: str) -> list[Hop]:
    pieces = re.split(r"^(\d+)\. ", section, flags=re.M)[1:]
    found = []
    for number, text in zip(pieces[::2], pieces[1::2], strict=True):
        carried = CARRIED.search(text)
        names = tuple(NAME.findall(text))
        found.append(Hop(int(number), names, carried and carried[1]))
    return found


WAYS = ways()
CASES = [
    pytest.param(title, k, id=f"{title}-{k + 1}")
    for title, found in WAYS.items()
    for k in range(len(found))
]


@functools.cache
def find(name: str) -> Found:
    """Resolves a dotted name: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        target: Any = module
        for part in parts[end:]:
            # Some modules import a name only when it is first read.
            look = getattr if inspect.ismodule(target) else inspect.getattr_static
            target = look(target, part)
        return Found(getattr(target, "__func__", target), module)
    raise ModuleNotFoundError(name)


def mentions(caller: str, called: str) -> bool:
    """Whether a function's body calls another function, or passes it on.

    A plain name must refer to the same object. Of an attribute only the name is
    compared.
    """
    last = called.rpartition(".")[2]
    here, there = find(caller), find(called).target
    for node in ast.walk(here.tree):
        if isinstance(node, ast.Attribute) and node.attr == last:
            return True
        if isinstance(node, ast.Name) and getattr(here.module, node.id, None) is there:
            return True
    return False


def attributes(name: str) -> set[str]:
    tree = find(name).tree
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def keywords(name: str) -> set[str | None]:
    tree = find(name).tree
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}


def test_there_are_four_ways_of_at_most_ten_hops() -> None:
    what = ("step", "gradient", "cluster", "stage")
    assert list(WAYS) == [f"The way of a {x}" for x in what]
    for found in WAYS.values():
        assert [hop.number for hop in found] == list(range(1, len(found) + 1))
        assert 2 <= len(found) <= MOST_HOPS


@pytest.mark.parametrize("name", sorted(set(NAME.findall(PAGE))))
def test_names_exist(name: str) -> None:
    assert callable(inspect.unwrap(find(name).target))


@pytest.mark.parametrize(("title", "k"), CASES)
def test_a_hop_calls_what_it_names(title: str, k: int) -> None:
    own = WAYS[title][k].names

    for position, name in enumerate(own[1:], start=1):
        assert any(mentions(before, name) for before in own[:position]), name


@pytest.mark.parametrize(("title", "k"), CASES)
def test_a_hop_calls_the_next(title: str, k: int) -> None:
    """If the page has a line of data between two hops, both hops mention the data."""
    here, below = WAYS[title][k], WAYS[title][k + 1 :]
    if here.carried is not None:
        above = stretch(WAYS[title][k::-1], skip=1)
        assert any(here.carried in keywords(name) for name in above)
        assert any(here.carried in attributes(name) for name in stretch(below))
    elif below:
        assert mentions(here.names[0], below[0].names[0])


def stretch(found: Sequence[Hop], skip: int = 0) -> list[str]:
    """The functions of the hops up to the next line of data."""
    ends = (k for k, hop in enumerate(found) if hop.carried and k >= skip)
    end = next(ends, len(found))
    return [n for hop in found[: end + 1 - skip] for n in hop.names]


def test_the_tree_names_the_rooms() -> None:
    tree = PAGE[PAGE.index("```text") : PAGE.index("## How to read")]
    rooms = {
        folder: {p.name for p in checkout.SOURCES[folder].iterdir() if p.is_dir()}
        for folder in checkout.SOURCES
    }
    for found in rooms.values():
        assert {f"{r}/" for r in found if r[0] != "_"} <= set(tree.split())


def test_the_pages_link_to_it() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "(docs/architecture.md)" in (checkout.ROOT / page).read_text()
