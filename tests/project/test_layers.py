"""Tests the import layers: autopar above two packages that do not import each other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import pytest

LINT = "from importlinter.cli import lint_imports_command as main; main()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on a tree, in a process without a cache."""
    folders = [str(root / folder) for folder in (".", "solver", "passes")]
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_layers_are_kept() -> None:
    result = lint_imports(checkout.ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


WRONG = [
    ("solver/autopar_solver/clock.py", "autopar.errors", "the layers"),
    ("solver/autopar_solver/clock.py", "autopar_passes.sums", "the layers"),
    ("solver/autopar_solver/clock.py", "jax", "the solver knows no"),
    ("passes/autopar_passes/graph/verify.py", "autopar.errors", "the layers"),
    ("passes/autopar_passes/graph/verify.py", "autopar_solver.ilp", "the layers"),
    ("autopar/plans/specs.py", "autopar.planner.plan", "autopar's rooms"),
    ("autopar/cost/pricer.py", "autopar.planner.plan", "autopar's rooms"),
    ("autopar/scheduler/policies/base.py", "autopar.dispatch", "policies know"),
    ("passes/autopar_passes/layouts.py", "autopar_passes.graph", "the rooms of"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What import-linter prints of each contract in a tree that breaks all of them."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copy(checkout.ROOT / "pyproject.toml", root)
    for source in checkout.SOURCES.values():
        shutil.copytree(
            source,
            root / source.relative_to(checkout.ROOT),
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for module, imported, _ in WRONG:
        with (root / module).open("a") as source:
            source.write(f"\nimport {imported}\n")
    (root / "autopar" / "unplaced.py").write_text('"""Of no layer."""\n')
    result = lint_imports(root)
    assert result.returncode == 1, result.stdout + result.stderr
    # The part of each contract in the output begins with its underlined name.
    parts = re.split(r"^(.+)\n-+\n", result.stdout, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("module", "imported", "contract"), WRONG)
def test_a_wrong_import_is_seen(
    broken: dict[str, str], module: str, imported: str, contract: str
) -> None:
    """No contract is vacuous: each forbidden import breaks one."""
    importer = module.removesuffix(".py").replace("/", ".")
    for folder in ("solver.", "passes."):
        importer = importer.removeprefix(folder)
    (said,) = [text for name, text in broken.items() if name.startswith(contract)]

    assert f"{importer} -> {imported} (" in said


def test_a_module_without_a_layer_is_seen(broken: dict[str, str]) -> None:
    (said,) = [text for name, text in broken.items() if "rooms: each" in name]

    assert "unplaced" in said


def test_private_jax_is_in_four_modules() -> None:
    """Every module that uses ``jax._src`` is in this list."""
    private = ("jax" + "._src", "jaxlib" + "._jax")
    users = {
        checkout.relative(path)
        for folder in checkout.SOURCES.values()
        for path in folder.rglob("*.py")
        if any(name in path.read_text() for name in private)
    }

    assert users <= {
        "passes/autopar_passes/jax_compat.py",
        "passes/autopar_passes/jax_meshes.py",
        "passes/autopar_passes/jax_processes.py",
    }
