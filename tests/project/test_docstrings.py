"""Tests that docstrings document the arguments and attributes that exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import checkout
import pytest

MODULES = checkout.modules()
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


def section(docstring: str, title: str) -> list[str] | None:
    """The names that a section of a Google docstring documents; None if there is none.

    >>> section("It.\\n\\nArgs:\\n  a, b: two.\\n    more: text.\\n  *c: rest.", "Args")
    ['a', 'b', 'c']
    """
    head = re.search(rf"^{title}:\n((?:[ \t]+.*\n|\n)*)", docstring + "\n", re.M)
    if head is None:
        return None
    lines = [line for line in head[1].splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    entries = [line[indent:] for line in lines if line[indent] != " "]
    names = [re.match(r"((?:\**\w+(?:, )?)+)(?: \(.*?\))?:", x) for x in entries]
    assert None not in names, f"no name and colon in {title}: {entries}"
    found = ", ".join(match[1] for match in names if match is not None)
    return [name.lstrip("*") for name in found.split(", ")]


def parameters(function: FunctionDef) -> list[str]:
    """The names of all parameters but ``self`` and ``cls``."""
    given = function.args
    named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
    found = [argument.arg for argument in (*named, given.kwarg) if argument]
    return [name for name in found if name not in {"self", "cls"}]


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields functions and classes with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def wrong_arguments(tree: ast.AST) -> Iterator[str]:
    """Yields functions whose ``Args:`` are not their parameters.

    The ``Args:`` of a class are those of its ``__init__``.
    """
    for name, node in definitions(tree):
        if not isinstance(node, FunctionDef):
            continue
        documented = section(ast.get_docstring(node) or "", "Args")
        if documented is not None and sorted(documented) != sorted(parameters(node)):
            yield f"{name}: {sorted({*documented} ^ {*parameters(node)})}"


def assigned(node: ast.ClassDef) -> set[str]:
    """The attributes of ``self`` that methods assign."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def attributes(owner: type, node: ast.ClassDef) -> set[str]:
    """The names of all attributes of an instance."""
    notes = [vars(base).get("__annotations__", ()) for base in owner.__mro__]
    return {*dir(owner), *assigned(node)}.union(*notes)


def public_fields(owner: type, node: ast.ClassDef) -> set[str]:
    """The public fields that a dataclass adds to its bases."""
    own = {_field(x) for x in node.body}
    if not dataclasses.is_dataclass(owner):
        return set()
    fields = {field.name for field in dataclasses.fields(owner)}
    return {name for name in own & fields if not name.startswith("_")}


def _field(node: ast.stmt) -> str:
    is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    return node.target.id if is_field else ""


def wrong_attributes(tree: ast.AST, names: Mapping[str, object]) -> Iterator[str]:
    """Yields classes whose ``Attributes:`` are not the fields that exist."""
    for name, node in definitions(tree):
        if not isinstance(node, ast.ClassDef) or name not in names:
            continue
        documented = section(ast.get_docstring(node) or "", "Attributes")
        owner = names[name]
        if documented is None or not isinstance(owner, type):
            continue
        strays = {*documented} - attributes(owner, node)
        lacking = public_fields(owner, node) - {*documented}
        if strays or lacking or len({*documented}) < len(documented):
            yield f"{name}: unknown {sorted(strays)}, undocumented {sorted(lacking)}"


def test_documented_arguments_are_the_parameters() -> None:
    wrong = [
        f"{module}.{line}"
        for module, path in MODULES.items()
        for line in wrong_arguments(ast.parse(path.read_text()))
    ]

    assert wrong == []


def test_documented_attributes_are_there() -> None:
    texts = {name: path.read_text() for name, path in MODULES.items()}
    wrong = [
        f"{module}.{line}"
        for module, text in texts.items()
        if "Attributes:" in text
        for line in wrong_attributes(
            ast.parse(text), vars(importlib.import_module(module))
        )
    ]

    assert wrong == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f(a, *b):\n  """It.\n\n  Args:\n    a: x.\n    *b: y.\n  """', []),
        ('def f(a, b):\n  """It.\n\n  Args:\n    a: x.\n  """', ["f: ['b']"]),
        ('def f():\n  """It.\n\n  Args:\n    c: x: y.\n  """', ["f: ['c']"]),
    ],
)
def test_wrong_arguments_are_seen(source: str, expected: list[str]) -> None:
    assert list(wrong_arguments(ast.parse(source))) == expected


@dataclasses.dataclass
class Documented:
    """A class for the test below.

    Attributes:
      a: a field.
      gone: an attribute that does not exist any more.
    """

    a: int
    b: int


def test_wrong_attributes_are_seen() -> None:
    tree = ast.parse(Path(__file__).read_text())

    found = list(wrong_attributes(tree, {"Documented": Documented}))

    assert found == ["Documented: unknown ['gone'], undocumented ['b']"]
