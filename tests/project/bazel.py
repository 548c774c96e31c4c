"""Executes BUILD files without Bazel, enough to check their targets."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import starlark
from starlark.eval.module import Module

RULES = ("py_binary", "py_library", "py_test")
_PYTHON_RULES = "@rules_python//python:defs.bzl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One call of a rule. Its sources and dependencies are absolute labels."""

    label: str
    rule: str
    srcs: tuple[str, ...]
    data: tuple[str, ...]
    deps: tuple[str, ...]
    visibility: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """All targets by label, and the files that BUILD files export by name."""

    root: Path
    targets: Mapping[str, Target]
    exported: frozenset[str]

    def path(self, label: str) -> Path:
        """The path of the file that a label names."""
        package, name = label.removeprefix("//").split(":")
        return self.root / package / name

    def sources(self, label: str) -> Iterator[Path]:
        """The source files of a target."""
        return (self.path(source) for source in self.targets[label].srcs)

    def visible(self, label: str, package: str) -> bool:
        """Whether a package may depend on a target."""
        rules = self.targets[label].visibility
        return _package_of(label) == package or any(
            _admits(rule, package) for rule in rules
        )


def load_workspace(root: Path) -> Workspace:
    """Executes every BUILD file below a folder."""
    targets: dict[str, Target] = {}
    exported: set[str] = set()
    for place, folders, names in os.walk(root):
        folders[:] = sorted(x for x in folders if not x.startswith((".", "__")))
        if "BUILD" in names:
            _execute(Path(place) / "BUILD", root, targets, exported)
    return Workspace(root, targets, frozenset(exported))


def execute_module(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a MODULE.bazel, such as ``("module", {"name": "autopar"})``."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def recorder(name: str) -> starlark.BuiltinFunction:
        return _builtin(name, lambda **attributes: calls.append((name, attributes)))

    def use_extension(file: str, name: str) -> starlark.Namespace:
        tags = {"python": ("toolchain",), "pip": ("parse",)}[name]
        return starlark.namespace(
            name, {tag: recorder(f"{name}.{tag}") for tag in tags}
        )

    plain = {"use_extension": use_extension, "use_repo": lambda *repositories: None}
    starlark.exec_file(
        path.read_text(),
        str(path),
        predeclared={name: recorder(name) for name in ("module", "bazel_dep")}
        | {name: starlark.BuiltinFunction(name, f) for name, f in plain.items()},
    )
    return calls


def _builtin(name: str, function: Callable[..., Any]) -> starlark.BuiltinFunction:
    """A Python function that Starlark code can call with its own values."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        plain = {key: starlark.from_value(value) for key, value in kwargs.items()}
        return starlark.to_value(function(*map(starlark.from_value, args), **plain))

    return starlark.BuiltinFunction(name, convert)


def _execute(
    build: Path, root: Path, targets: dict[str, Target], exported: set[str]
) -> None:
    package = "/".join(build.parent.relative_to(root).parts)
    default: list[str] = []

    def declare(rule: str, name: str, **attributes: Any) -> None:
        target = _target(rule, package, name, attributes, default)
        assert target.label not in targets, f"{target.label} is declared twice"
        targets[target.label] = target

    def export(names: list[str]) -> None:
        exported.update(f"//{package}:{name}" for name in names)

    def glob(
        include: list[str], exclude: Iterable[str] = (), allow_empty: bool = False
    ) -> list[str]:
        found = _glob(build.parent, include, exclude)
        assert found or allow_empty, f"{build}: glob({list(include)}) finds nothing"
        return found

    def load(file: str) -> Module:
        assert file == _PYTHON_RULES, f"{build} loads {file}"
        rules = Module(file)
        for rule in RULES:
            rules.set(rule, _builtin(rule, functools.partial(declare, rule)))
        return rules

    functions: dict[str, Callable[..., Any]] = {
        "package": lambda default_visibility: default.extend(default_visibility),
        "licenses": lambda kinds: None,
        "exports_files": export,
        "glob": glob,
    }

    starlark.exec_file(
        build.read_text(),
        str(build),
        loader=load,
        predeclared={name: _builtin(name, f) for name, f in functions.items()},
    )


def _target(
    rule: str,
    package: str,
    name: str,
    attributes: Mapping[str, Any],
    default_visibility: list[str],
) -> Target:
    def labels(attribute: str) -> tuple[str, ...]:
        return tuple(_absolute(x, package) for x in attributes.get(attribute, ()))

    return Target(
        label=f"//{package}:{name}",
        rule=rule,
        srcs=labels("srcs"),
        data=labels("data"),
        deps=labels("deps"),
        visibility=tuple(attributes.get("visibility", default_visibility)),
        attributes=dict(attributes),
    )


def _absolute(label: str, package: str) -> str:
    """The absolute label: ``//a`` is ``//a:a``, ``:b`` and ``b`` are in the package."""
    if label.startswith("@"):
        return label
    if not label.startswith("//"):
        return f"//{package}:{label.removeprefix(':')}"
    return label if ":" in label else f"{label}:{label.rsplit('/', 1)[-1]}"


def _package_of(label: str) -> str:
    return label.removeprefix("//").split(":")[0]


def _admits(rule: str, package: str) -> bool:
    if rule == "//visibility:public":
        return True
    allowed, _, kind = rule.removeprefix("//").partition(":")
    if kind == "__subpackages__":
        return not allowed or f"{package}/".startswith(f"{allowed}/")
    return kind == "__pkg__" and allowed == package


def _glob(folder: Path, include: list[str], exclude: Iterable[str]) -> list[str]:
    """The files of a package that match: a glob does not enter another package."""
    excluded = [_pattern(pattern) for pattern in exclude]
    found: set[str] = set()
    for pattern in map(_pattern, include):
        for name in _files(folder):
            if pattern.fullmatch(name) and not any(
                other.fullmatch(name) for other in excluded
            ):
                found.add(name)
    return sorted(found)


@functools.cache
def _files(folder: Path) -> tuple[str, ...]:
    """The files below a folder that belong to no package in a subfolder."""
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        if place != str(folder) and "BUILD" in names:
            folders.clear()
            continue
        within = Path(place).relative_to(folder)
        found += [(within / name).as_posix() for name in names]
    return tuple(found)


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob's regular expression: ``**`` matches folders, ``*`` part of a name."""
    text = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
    return re.compile(text.replace(r"\*", "[^/]*"))
