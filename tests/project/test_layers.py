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
    ("module", "statement"),
    [
        ("solver/autopar_solver", "import autopar.plan"),
        ("solver/autopar_solver", "import autopar_passes.trace"),
        ("solver/autopar_solver", "import jax.numpy"),
        ("passes/autopar_passes", "from autopar import plan"),
        ("passes/autopar_passes", "import autopar_solver.solve"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, module: str, statement: str) -> None:
    """The contracts are not empty: each forbidden import breaks one."""
    shutil.copy(checkout.ROOT / "pyproject.toml", tmp_path)
    for package, source in checkout.SOURCES.items():
        folder = tmp_path / source.relative_to(checkout.ROOT)
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for name in ("plan", "solve", "trace"):
            (folder / f"{name}.py").write_text(f'"""Of {package}."""\n')
    assert lint_imports(tmp_path).returncode == 0

    (tmp_path / module / "wrong.py").write_text(statement + "\n")
    result = lint_imports(tmp_path)

    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_private_jax_is_in_one_module() -> None:
    """Whatever touches ``jax._src`` is in ``autopar_passes.jax_compat``."""
    private = ("jax" + "._src", "jaxlib" + "._jax")
    users = {
        checkout.relative(path)
        for folder in checkout.SOURCES.values()
        for path in folder.rglob("*.py")
        if any(name in path.read_text() for name in private)
    }

    assert users <= {"passes/autopar_passes/jax_compat.py"}
