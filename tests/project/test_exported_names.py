"""Tests that ``from autopar import ...`` offers exactly ``__all__``."""

import ast
import importlib
import inspect
import pathlib
from types import ModuleType

import pytest

import autopar
import autopar_errors
import autopar_passes
import autopar_solver

PACKAGES = [autopar, autopar_errors, autopar_passes, autopar_solver]
# The names that the README uses.
PROMISED = {"Cluster", "Plan", "PlanError", "parallelize", "plan", "register_rule"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_sorted_and_resolves(package: ModuleType) -> None:
    names = list(getattr(package, "__all__", ()))

    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(package, name)] == []


def is_plain_module(found: object) -> bool:
    """Whether an object is a module, and not a package that can be called."""
    return inspect.ismodule(found) and not callable(found)


def test_all_is_what_is_public() -> None:
    public = {
        name
        for name in dir(autopar)
        if not name.startswith("_") and not is_plain_module(getattr(autopar, name))
    }

    assert {name for name in autopar.__all__ if not name.startswith("_")} == public


def test_type_checkers_see_the_same() -> None:
    stub = ast.parse(pathlib.Path(autopar.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.asname: importlib.import_module(node.module or "")
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert sorted(map(str, imported)) == autopar.__all__
    for name, home in imported.items():
        found, function = getattr(autopar, str(name)), getattr(home, str(name))
        if inspect.ismodule(found):
            with pytest.raises(TypeError, match=f"{function.__name__}\\(\\) missing"):
                found()
        else:
            assert found is function


def test_what_the_readme_promises_is_there() -> None:
    assert set(autopar.__all__) >= PROMISED


def test_exported_names_are_documented() -> None:
    exported = (getattr(autopar, name) for name in autopar.__all__)
    documented = filter(callable, exported)

    assert [value for value in documented if not inspect.getdoc(value)] == []
