"""Tests that the BUILD files name every module and every import, and nothing else."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import itertools
import re
import sys
from pathlib import Path

import bazel
import checkout
import pytest
from packaging.requirements import Requirement

import autopar.version

DISTRIBUTIONS = importlib.metadata.packages_distributions()
# Import names of our own code, and the target that provides each.
OURS = {
    "autopar": "//autopar:autopar",
    "autopar_errors": "//autopar_errors:autopar_errors",
    "autopar_passes": "//passes:passes",
    "autopar_solver": "//solver:solver",
}


@pytest.fixture(scope="module")
def workspace() -> bazel.Workspace:
    """The BUILD files, executed once and not by each process that collects tests."""
    return bazel.load_workspace(checkout.ROOT)


def normalised(distribution: str) -> str:
    """The spelling of a distribution that rules_python uses in labels."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def locked() -> set[str]:
    lock = (checkout.ROOT / "requirements.lock").read_text()
    return {normalised(name) for name in re.findall(r"^([\w.-]+)==", lock, re.M)}


@functools.cache
def imported(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names


def providers(name: str) -> set[str]:
    """The labels of the targets that may provide an import name."""
    if name in OURS:
        return {OURS[name]}
    found = DISTRIBUTIONS.get(name, [])
    return {f"@pypi//{normalised(distribution)}" for distribution in found}


def test_every_module_is_in_a_target(workspace: bazel.Workspace) -> None:
    covered = {path for label in workspace.targets for path in workspace.sources(label)}

    assert set(checkout.files(".py")) - covered == set()


def test_files_exist_and_those_of_other_packages_are_exported(
    workspace: bazel.Workspace,
) -> None:
    for label, target in workspace.targets.items():
        named = {*target.srcs, *target.data}
        foreign = {x for x in named if not x.startswith(f"{label.split(':')[0]}:")}

        assert not [x for x in named if not workspace.path(x).is_file()], label
        assert foreign <= workspace.exported, label


def test_dependencies_resolve(workspace: bazel.Workspace) -> None:
    known = locked()
    for label, target in workspace.targets.items():
        package = label.removeprefix("//").split(":")[0]
        for dependency in target.deps:
            if dependency.startswith("@pypi//"):
                assert dependency.removeprefix("@pypi//") in known, label
            else:
                assert dependency in workspace.targets, label
                assert workspace.visible(dependency, package), (label, dependency)


def test_imports_are_dependencies(workspace: bazel.Workspace) -> None:
    for label, target in workspace.targets.items():
        dependencies = {label, *target.deps}
        names = set().union(*map(imported, workspace.sources(label)))
        for name in sorted(names - imported_by_file_name(dependencies, workspace)):
            labels = providers(name)
            assert labels & dependencies, f"{label} lacks {sorted(labels)} for {name}"


def imported_by_file_name(labels: set[str], workspace: bazel.Workspace) -> set[str]:
    """The names of the targets' files, which scripts in the same folder can import."""
    internal = labels & workspace.targets.keys()
    return {path.stem for label in internal for path in workspace.sources(label)}


def test_layers_depend_as_drawn(workspace: bazel.Workspace) -> None:
    """Bazel would refuse the same imports as import-linter."""
    internal = {
        label: {d for d in workspace.targets[label].deps if d.startswith("//")}
        for label in OURS.values()
    }
    below = OURS["autopar_errors"]

    assert internal == {
        "//autopar:autopar": {below, "//passes:passes", "//solver:solver"},
        "//passes:passes": {below},
        "//solver:solver": {below},
        below: set(),
    }


def test_runtime_dependencies_are_declared(workspace: bazel.Workspace) -> None:
    """The libraries depend only on distributions that are installed with autopar.

    The compilers of accelerators are looked for at run time, so they are no
    dependencies.
    """
    project = checkout.pyproject()["project"]
    optional = project["optional-dependencies"].items()
    extras = itertools.chain(*(e for n, e in optional if not n.endswith("-compiler")))
    requirements = map(Requirement, [*project["dependencies"], *extras])
    names = {normalised(requirement.name) for requirement in requirements}
    used = {
        dependency.removeprefix("@pypi//")
        for label in OURS.values()
        for dependency in workspace.targets[label].deps
        if dependency.startswith("@pypi//")
    }

    assert used == names


def test_binaries_have_their_module(workspace: bazel.Workspace) -> None:
    binaries = [t for t in workspace.targets.values() if t.rule == "py_binary"]
    mains = {target.attributes["main_module"] for target in binaries}

    assert mains == {"autopar", "autopar_solver"}
    for name in mains:
        assert (checkout.SOURCES[name] / "__main__.py").is_file()


def test_every_test_runs_under_bazel(workspace: bazel.Workspace) -> None:
    """All tests but those that read the checkout, which Bazel's sandbox hides."""
    tests = {
        path
        for path in checkout.files(".py")
        if path.name.startswith("test_") and path.parent != Path(__file__).parent
    }
    run = {
        path
        for label in workspace.targets
        if workspace.targets[label].rule == "py_test"
        for path in workspace.sources(label)
    }

    assert run == tests


def test_module_agrees_with_pyproject(workspace: bazel.Workspace) -> None:
    calls = bazel.execute_module(checkout.ROOT / "MODULE.bazel")
    module = dict(calls)["module"]
    locks = {x["requirements_lock"] for name, x in calls if name == "pip.parse"}

    assert module == {"name": "autopar", "version": autopar.version.__version__}
    assert locks <= workspace.exported
