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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, to spoil."""
    shutil.copy(checkout.ROOT / "pyproject.toml", tmp_path)
    for source in checkout.SOURCES.values():
        shutil.copytree(
            source,
            tmp_path / source.relative_to(checkout.ROOT),
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return tmp_path


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("solver/autopar_solver/clock.py", "import autopar.errors", "the layers"),
        ("solver/autopar_solver/clock.py", "import autopar_passes.sums", "the layers"),
        ("solver/autopar_solver/clock.py", "import jax.numpy", "the solver knows no"),
        ("passes/autopar_passes/debug.py", "from autopar import errors", "the layers"),
        ("passes/autopar_passes/debug.py", "import autopar_solver.ilp", "the layers"),
        ("autopar/plans/specs.py", "import autopar.planner.plan", "autopar's rooms"),
        ("autopar/cluster/groups.py", "import autopar.cluster.cluster", "clusters"),
        ("autopar/cost/items.py", "import autopar.cost.evaluate", "the cost"),
        ("autopar/steps/nodes.py", "import autopar.steps.analysis", "the step"),
        ("autopar/layouts/layout.py", "import autopar.layouts.copies", "layouts"),
        ("autopar/runtime/world.py", "import autopar.runtime.timing", "the runtime"),
        ("autopar/reports/table.py", "import autopar.reports.audit", "reports"),
        ("autopar/plans/specs.py", "import autopar.plans.schema", "plans"),
        (
            "autopar/compression/exchange.py",
            "import autopar.compression.feedback",
            "compression",
        ),
    ],
)
def test_a_wrong_import_is_seen(
    tree: Path, module: str, statement: str, contract: str
) -> None:
    """The contracts are not empty: each forbidden import breaks one."""
    with (tree / module).open("a") as source:
        source.write(f"\n{statement}\n")

    result = lint_imports(tree)

    assert result.returncode == 1, result.stdout + result.stderr
    broken = [x for x in result.stdout.splitlines() if x.endswith("BROKEN")]
    assert any(line.startswith(contract) for line in broken), broken


def test_a_module_without_a_layer_is_seen(tree: Path) -> None:
    (tree / "autopar" / "cost" / "unplaced.py").write_text('"""Of no layer."""\n')

    result = lint_imports(tree)

    assert result.returncode == 1
    assert "unplaced" in result.stdout


def test_private_jax_is_in_two_modules() -> None:
    """Whatever touches ``jax._src`` is in ``jax_compat`` or ``jax_processes``."""
    private = ("jax" + "._src", "jaxlib" + "._jax")
    users = {
        checkout.relative(path)
        for folder in checkout.SOURCES.values()
        for path in folder.rglob("*.py")
        if any(name in path.read_text() for name in private)
    }

    assert users <= {
        "passes/autopar_passes/jax_compat.py",
        "passes/autopar_passes/jax_processes.py",
    }
