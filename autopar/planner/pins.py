"""Layouts of inputs on the command line: ``--pin PATH=SPEC``."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar_errors import InputError

_EXAMPLE = "Write it like 'params/*/kernel=None,tensor' or \"...=P(None, 'tensor')\"."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def parse_pins(words: Sequence[str]) -> dict[str, PartitionSpec]:
    """Reads the values of ``--pin``.

    Raises:
      PlanError: one is not ``PATH=SPEC``, or names a path twice.
    """
    out: dict[str, PartitionSpec] = {}
    for word in words:
        path, equals, text = word.partition("=")
        path = path.strip()
        if not path or not equals:
            raise PlanError(f"--pin {word!r} is not PATH=SPEC. {_EXAMPLE}")
        if path in out:
            raise PlanError(f"--pin: '{path}' is pinned twice.")
        try:
            out[path] = PartitionSpec(*parse_entries(text))
        except ValueError as error:
            raise PlanError(f"--pin {word!r}: {error}. {_EXAMPLE}") from error
    return out


def parse_entries(text: str) -> tuple[str | tuple[str, ...] | None, ...]:
    """Reads a layout, as tables print it or in short.

    >>> parse_entries("P(None, ('data', 'tensor'))")
    (None, ('data', 'tensor'))
    >>> parse_entries("data+fsdp,None")
    (('data', 'fsdp'), None)

    Raises:
      InputError: it is neither.
    """
    text = text.strip()
    if text.startswith(("P(", "PartitionSpec(")):
        return _entries_of_call(text)
    if text in ("", "None"):
        return () if not text else (None,)
    return tuple(_short_entry(part.strip()) for part in text.split(","))


def _short_entry(part: str) -> str | tuple[str, ...] | None:
    if part == "None":
        return None
    names = tuple(name.strip() for name in part.split("+"))
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is no name of a mesh axis")
    return names[0] if len(names) == 1 else names


def _entries_of_call(text: str) -> tuple[str | tuple[str, ...] | None, ...]:
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InputError(f"{text!r} is no layout") from error
    if not isinstance(call, ast.Call) or call.keywords:
        raise InputError(f"{text!r} is no layout")
    return tuple(_entry(argument) for argument in call.args)


def _entry(node: ast.expr) -> str | tuple[str, ...] | None:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(name)):
            return name
        case ast.Tuple(elts=[*names]) if names:
            return tuple(_name(name) for name in names)
        case _:
            raise InputError(
                f"{ast.unparse(node)} is no entry: None, a name in quotes, or a tuple "
                "of names"
            )


def _name(node: ast.expr) -> str:
    found = _entry(node)
    if not isinstance(found, str):
        raise InputError(f"{ast.unparse(node)} is no name of a mesh axis")
    return found
