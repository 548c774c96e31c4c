"""Tests that dotted names in docstrings, pages and the changelog exist."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import checkout
import pytest

MODULES = checkout.modules()
# The attribute that contains the annotations of a class.
NOTES = "__annotations__"
ROOTS = tuple(checkout.SOURCES)
QUOTED = re.compile(r"``([^`]+)``|`([^`]+)`")
# A dotted name, with the arguments if it is called.
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+)(?:\((.*)\))?")
PAGES = [
    checkout.ROOT / "README.md",
    *sorted((checkout.ROOT / "docs").rglob("*.md")),
    checkout.ROOT / "CHANGELOG.md",
]


def dotted(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the dotted names in backticks, each with the keywords of its call."""
    for plain in QUOTED.finditer(text):
        said = " ".join((plain[1] or plain[2]).split())
        if match := DOTTED.fullmatch(said):
            yield match[1], re.findall(r"(\w+)=", match[2] or "")


def follow(found: object, parts: list[str]) -> object:
    """The object that the parts of a name denote; None if a type on the way is unknown.

    Raises:
      AttributeError: one of the parts does not exist.
    """
    for part in parts:
        if isinstance(found, ModuleType):
            found = _of_module(found, part)
        elif inspect.isclass(found):
            found = _of_class(found, part)
        elif found is not None:
            found = getattr(found, part)
    return found


def _of_module(module: ModuleType, name: str) -> object:
    inner = f"{module.__name__}.{name}"
    if hasattr(module, name) or inner not in MODULES:
        return getattr(module, name)
    return importlib.import_module(inner)


def _of_class(owner: type, name: str) -> object:
    """The method of that name, or the class of the field of that name."""
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, property | functools.cached_property):
        getter = found.fget if isinstance(found, property) else found.func
        return _class_of(typing.get_type_hints(getter).get("return"))
    notes = [base for base in owner.__mro__ if name in vars(base).get(NOTES, ())]
    if notes:
        try:
            return _class_of(typing.get_type_hints(notes[0])[name])
        except NameError:  # a type that is imported only for type checkers
            return None
    if hasattr(owner, name):
        return getattr(owner, name)
    _require_given(owner, name)
    return None


def _class_of(hint: object) -> object:
    return hint if inspect.isclass(hint) else None


def _require_given(owner: type, name: str) -> None:
    """Raises AttributeError unless a method assigns that attribute of `self`."""
    if not any(
        re.search(rf"\bself\.{name}\b[^=\n]* = ", _source(base))
        for base in owner.__mro__
    ):
        raise AttributeError(f"{owner.__name__} has no {name}")


def _source(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # a class that is not written in Python
        return ""


def stale(text: str, names: dict[str, object]) -> Iterator[str]:
    """Yields the dotted names that begin with one of `names` and do not exist."""
    for name, keywords in dotted(text):
        first, *rest = name.split(".")
        if first not in names:
            continue
        try:
            found = follow(names[first], rest)
            if keywords and callable(found):
                known = inspect.signature(found).parameters
                yield from (f"{name}({k}=)" for k in keywords if k not in known)
        except AttributeError as error:
            yield f"{name}: {error}"


def packages() -> dict[str, object]:
    return {name: importlib.import_module(name) for name in ROOTS}


def known_in(module: str) -> dict[str, object]:
    """The packages, and the classes that a module defines or imports."""
    names = vars(importlib.import_module(module))
    own = {name: value for name, value in names.items() if inspect.isclass(value)}
    return packages() | own


def docstrings(source: str) -> str:
    """All string statements of a source: docstrings of modules, classes and values."""
    return "\n\n".join(
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def page_text(path: Path) -> str:
    """A page without its code blocks; of the changelog only the unreleased part."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    if path.name == "CHANGELOG.md":
        return text.split("\n## [")[1]
    return text


def test_docstrings_name_what_is_there() -> None:
    found = [
        f"{module}: {line}"
        for module, path in MODULES.items()
        if not module.endswith("__main__")  # importing such a module runs it
        for line in stale(docstrings(path.read_text()), known_in(module))
    ]

    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=checkout.relative)
def test_pages_name_what_is_there(path: Path) -> None:
    assert list(stale(page_text(path), packages())) == []


class Example:
    """A class for the test below."""

    field: int

    def __init__(self) -> None:
        self.given = 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`autopar.plan` and ``autopar.Plan.save``", 0),
        ("`autopar.parallelize(policy=)`", 0),
        ("`autopar.parallelize(polizei=)`", 1),
        ("`autopar.cost.compute.op_seconds`", 1),
        ("`autopar.no_module.name`", 1),
        ("`autopar.Plan.no_method`", 1),
        ("`Example.field`, `Example.given` and\n`Other.name`", 0),
        ("`Example.taken`", 1),
    ],
)
def test_stale_names_are_seen(text: str, count: int) -> None:
    assert len(list(stale(text, packages() | {"Example": Example}))) == count
