"""Tests that imports are at the top of modules, or say why not, and form no cycles."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import checkout
import pytest

Graph = Mapping[str, Set[str]]

MODULES = checkout.modules()
# The modules that must be imported late. A comment above each import says why.
LATE = {
    'autopar/backends/ray.py: return importlib.import_module("ray")',
    'autopar/backends/ray.py: sdk = importlib.import_module("ray.autoscaler.sdk")',
    "autopar/cli/app.py: from autopar.errors import TargetError",
    "autopar/cli/failures.py: from autopar.errors import AutoparError, "
    "InfeasibleError, InternalError",
    "autopar/cli/failures.py: from autopar.errors import TargetError, user_line",
    "autopar/cli/options.py: from autopar.cli import common",
    "autopar/cluster/local.py: import jax",
    "autopar/elastic/__init__.py: from autopar.elastic.train import elastic",
    "autopar/elastic/processes/coordination.py: from autopar_passes import "
    "jax_processes",
    "solver/autopar_solver/sharding/bounds/message_passing.py: "
    'numba: Any = importlib.import_module("numba")',
}


@functools.cache  # two tests read each module
def unusual(source: str) -> list[tuple[int, bool]]:
    """The line of each import below the top level, and whether a comment explains it.

    Every importer runs the top level: it is outside functions and outside blocks of
    ``if TYPE_CHECKING``. The explanation is a comment on the line or in the line above.
    """
    lines = source.splitlines()
    found = {
        inner.lineno
        for node in ast.walk(ast.parse(source))
        if _is_late(node)
        for inner in ast.walk(node)
        if _is_import(inner)
    }
    out: list[tuple[int, bool]] = []
    for number in sorted(found):
        above, line = lines[number - 2 : number]
        out.append((number, above.strip().startswith("#") or "#" in line))
    return out


def _is_late(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_import(node: ast.AST) -> bool:
    """Whether a node is an import, or a call that imports a constant name."""
    if isinstance(node, ast.Call) and node.args:
        if not isinstance(node.args[0], ast.Constant):
            return False
        called = ast.unparse(node.func).rpartition(".")[2]
        return called in {"import_module", "__import__"}
    return isinstance(node, ast.Import | ast.ImportFrom)


def imports(name: str, source: str, known: Set[str], is_package: bool) -> set[str]:
    """The modules out of `known` that a module imports at any place."""
    home = name if is_package else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = home.split(".")[: len(home.split(".")) + 1 - node.level]
            base = ".".join([*(up if node.level else []), node.module or ""]).strip(".")
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= (names & known) | ({base} if names - known else set())
    return (found & known) - {name}


def components(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module, sorted."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {
        frozenset(b for b in reached[a] if a in reached[b])
        for a in graph
        if a in reached[a]
    }
    return sorted(sorted(component) for component in found)


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(graph[name])
    return found


def text(path: Path) -> str:
    return path.read_text()


def test_imports_stand_at_the_top_or_say_why_not() -> None:
    silent = [
        f"{checkout.relative(path)}:{line}"
        for path in MODULES.values()
        for line, reason in unusual(text(path))
        if not reason
    ]

    assert silent == []


def test_late_imports_are_the_known_ones() -> None:
    found = {
        f"{checkout.relative(path)}: {text(path).splitlines()[line - 1].strip()}"
        for path in MODULES.values()
        for line, _ in unusual(text(path))
    }

    assert found == LATE


def test_no_module_imports_itself_through_others() -> None:
    """This holds also for late imports, and for imports for type checkers."""
    graph = {
        name: imports(name, text(path), MODULES.keys(), path.stem == "__init__")
        for name, path in MODULES.items()
    }

    assert components(graph) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a\n", []),
        ("try:\n    import a\nexcept ImportError:\n    a = None\n", []),
        ("def f():\n    import a\n", [(2, False)]),
        ("def f():\n    import a  # slow\n", [(2, True)]),
        ("def f():\n    # slow\n    import a\n", [(3, True)]),
        ("def f():\n    importlib.import_module('a')\n", [(2, False)]),
        ("def f():\n    importlib.import_module(name)\n", []),
        ("if TYPE_CHECKING:\n    from a import b\n", [(2, False)]),
        ("if typing.TYPE_CHECKING:\n    import a\n", [(2, False)]),
    ],
)
def test_unusual_imports_are_seen(source: str, expected: list[object]) -> None:
    assert list(unusual(source)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import p.b", {"p.b"}),
        ("from p import b", {"p.b"}),
        ("from p.b import thing", {"p.b"}),
        ("from p import thing", {"p"}),
        ("from . import b", {"p.b"}),
        ("from .b import thing", {"p.b"}),
        ("if TYPE_CHECKING:\n    from p import b, thing", {"p", "p.b"}),
        ("import json", set()),
    ],
)
def test_imports_are_seen(source: str, expected: set[str]) -> None:
    assert imports("p.a", source, {"p", "p.a", "p.b"}, False) == expected


def test_cycles_are_named() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"e"}}

    assert components(graph) == [["b", "c"], ["e"]]


def test_importing_starts_no_backend() -> None:
    """After the import, a script can still set how many devices JAX has."""
    modules = (
        "autopar, autopar.elastic, autopar.goodput, autopar.checkpoint.checkpoints, "
        "autopar.runtime.parallel_step, autopar.cli.app, autopar.elastic.train"
    )
    program = f"import jax, {modules}; jax.config.update('jax_num_cpu_devices', 2)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_must_begin_at_once_imports_no_jax() -> None:
    """A restarted supervisor must respond before its workers give up waiting."""
    modules = "autopar.elastic.processes.runner, autopar.cli.ledgering"
    program = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", program], check=False).returncode


def test_scripts_have_names_of_their_own() -> None:
    """Tests import scripts by file name, so two equal names would be mixed up."""
    folders = ("examples", "benchmarks", "scripts", "tests/support")
    found = [
        path.stem for name in folders for path in (checkout.ROOT / name).glob("*.py")
    ]
    assert found
    assert sorted(found) == sorted(set(found))
