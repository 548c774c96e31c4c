"""Tests that ``except autopar.AutoparError`` catches the errors of all packages."""

from __future__ import annotations

import ast
import builtins
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import checkout
import jax
import numpy as np
import pytest

import autopar
from autopar import Cluster, errors
from autopar.compression.codecs.registry import parse_codec, register_codec
from autopar.compression.policies import GraVAC
from autopar_solver.sharding.contest import read_contest_instance

NO_MISTAKES = (errors.CompileError, errors.RunError, errors.InternalError)
# Of Python's own errors, those that no caller sees: an ended iteration, a process that
# is gone, a module's missing attribute; and our own invariants.
WITHIN = {
    "AssertionError",
    "AttributeError",
    "ConnectionError",
    "EOFError",
    "FileNotFoundError",
    "KeyError",
    "StopIteration",
}
W = np.ones((16, 16), np.float32)


def classes(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from classes(below)


def drawn() -> dict[str, str]:
    """Each class in the tree of the module's docstring, and its base class."""
    found, above = {}, [(-1, "")]
    for indent, name in re.findall(r"^ {4}([ │├└─]*)(\w+)", errors.__doc__ or "", re.M):
        while above[-1][0] >= len(indent):
            above.pop()
        found[name] = above[-1][1]
        above.append((len(indent), name))
    return found


def test_the_tree_is_as_it_is_drawn() -> None:
    tree = drawn()

    assert set(tree) == {name for name in errors.__all__ if name[0].isupper()}
    for name, above in tree.items():
        kind = getattr(errors, name)
        assert kind.__base__ is (getattr(errors, above) if above else Exception)


def test_only_a_mistake_is_a_value_error() -> None:
    kinds = set(classes(autopar.AutoparError))

    for kind in kinds - {autopar.AutoparError}:
        ours = kind.__module__.split(".")[0] in checkout.SOURCES
        mistake = issubclass(kind, (ValueError, TypeError))
        if issubclass(kind, NO_MISTAKES):
            assert not mistake, kind
        elif ours and getattr(errors, kind.__name__, None) is kind:
            assert mistake, kind


def bare(source: str) -> Iterator[str]:
    """The built-in errors that a module raises."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            kind = getattr(builtins, ast.unparse(raised), None)
            if isinstance(kind, type) and kind.__name__ not in WITHIN:
                yield f"{node.lineno}: {kind.__name__}"


def test_no_package_raises_an_error_of_python() -> None:
    found = [
        f"{checkout.relative(path)}:{line}"
        for path in checkout.modules().values()
        for line in bare(path.read_text())
    ]

    assert found == []
    assert list(bare("raise ValueError")) == ["1: ValueError"]
    assert list(bare("raise TypeError('x') from None")) == ["1: TypeError"]


def step(w: Any, batch: Any) -> Any:
    grad = jax.grad(lambda w: ((batch @ w) ** 2).mean())(w)
    return w - 0.1 * grad, grad.sum()


def train(**options: Any) -> None:
    run = autopar.parallelize(step, cluster="8:cpu")
    given = {"base_batch": 16, "max_batch": 64, "steps": 1} | options
    autopar.train(run, lambda: W, lambda position, rows: W, **given)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda path: Cluster.parse("8:nothing"), ValueError),
        (lambda path: Cluster.from_data({}), ValueError),
        (lambda path: Cluster.parse(8), TypeError),
        (lambda path: Cluster.from_toml(8), TypeError),
        (lambda path: autopar.Plan.load(8), TypeError),
        (lambda path: autopar.Plan.from_json(8), TypeError),
        (lambda path: autopar.Checkpoints(8), TypeError),
        (lambda path: autopar.parallelize(step, cache=8), TypeError),
        (lambda path: autopar.parallelize(step, devices=8), TypeError),
        (lambda path: autopar.parallelize(step, static_argnames=8), TypeError),
        (lambda path: autopar.parallelize(step, world=8), TypeError),
        (
            lambda path: autopar.plan(
                step, W, W, cluster="8:cpu", logical_axis_rules=[1]
            ),
            ValueError,
        ),
        (lambda path: train(codecs=8), TypeError),
        (lambda path: train(samples="x"), TypeError),
        (lambda path: train(checkpoint=8), TypeError),
        (lambda path: Cluster.parse("8:h100").slice((3,)), ValueError),
        (lambda path: autopar.Plan.from_json("{"), ValueError),
        (lambda path: autopar.Plan.load(path / "none"), ValueError),
        (lambda path: autopar.plan(step, W, cluster="8:cpu"), ValueError),
        (
            lambda path: autopar.plan(step, W, W, cluster="8:cpu", compression="x"),
            ValueError,
        ),
        (lambda path: autopar.parallelize(step, cluster="x"), ValueError),
        (lambda path: autopar.audit(step, W, W, plan=path), ValueError),
        (
            lambda path: autopar.Checkpoints(path).restore(
                autopar.parallelize(step, cluster="8:cpu"), lambda: W, batch=W
            ),
            ValueError,
        ),
        (lambda path: parse_codec("int8:block=x"), ValueError),
        (lambda path: register_codec(object), TypeError),
        (lambda path: GraVAC(levels=()), ValueError),
        (lambda path: train(base_batch=0), ValueError),
        (lambda path: train(steps="x"), ValueError),
        (lambda path: read_contest_instance(written(path, "{}")), ValueError),
    ],
)
def test_a_mistake_is_an_error_of_autopar(
    call: Callable[[pathlib.Path], Any], kind: type[Exception], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(autopar.AutoparError) as found:
        call(tmp_path)

    assert isinstance(found.value, kind)


def written(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "given"
    path.write_text(text)
    return path


def test_a_message_shows_the_beginning_of_a_long_argument() -> None:
    wrong: Any = {"a": 0, "b": "long" * 1000}
    with pytest.raises(errors.AutoparError, match=r"got {'a': 0, .*\(dict\)") as found:
        autopar.Plan.from_json(wrong)
    assert len(str(found.value)) < 400
