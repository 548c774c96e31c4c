"""The layers: autopar above two lower ones that do not know each other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import pytest

LINT = "from importlinter.cli import lint_imports_command as main; main()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on a tree in a process of its own, which keeps no cache."""
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


@pytest.mark.parametrize(
    ("folder", "statement"),
    [
        ("solver/autopar_solver", "import autopar.version"),
        ("solver/autopar_solver", "import autopar_passes.jax_compat"),
        ("solver/autopar_solver", "import jax.numpy"),
        ("solver/autopar_solver/sharding", "import autopar_solver.selection.problem"),
        ("solver/autopar_solver/ilp", "import autopar_solver.sharding.problem"),
        ("passes/autopar_passes", "from autopar import version"),
        ("passes/autopar_passes", "import autopar_solver.status"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, folder: str, statement: str) -> None:
    """The contracts are not empty: each forbidden import breaks one."""
    shutil.copy(checkout.ROOT / "pyproject.toml", tmp_path)
    skipped = shutil.ignore_patterns("__pycache__")
    for source in checkout.SOURCES.values():
        copy = tmp_path / source.relative_to(checkout.ROOT)
        shutil.copytree(source, copy, ignore=skipped)

    (tmp_path / folder / "wrong.py").write_text(statement + "\n")
    result = lint_imports(tmp_path)

    assert result.returncode == 1, result.stdout + result.stderr
    assert "wrong -> " in result.stdout
