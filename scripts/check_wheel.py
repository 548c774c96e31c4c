"""Builds the wheel, and checks that it works without the source tree.

The wheel is built from the sdist and installed in a new virtual environment, with only
the dependencies that it declares. Then it is used from an empty folder.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("autopar", "autopar_errors", "autopar_passes", "autopar_solver")
# Data files that modules read.
DATA = (
    "autopar/cluster/rates/xla.json",
    *(
        str(path.relative_to(ROOT))
        for path in (ROOT / "autopar" / "cluster" / "devices").glob("*.toml")
    ),
)
# Imports all modules, and checks that each comes from the environment.
IMPORT_ALL = f"""
import importlib, pkgutil, sys
for package in map(importlib.import_module, {PACKAGES!r}):
    assert package.__file__.startswith(sys.prefix), package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
"""


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> None:
    """Runs a command outside of the source tree, without the project in its path."""
    print("+", *command, flush=True)
    unwanted = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    subprocess.run(command, cwd=cwd, env=environment, check=True)


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the sdist, and the wheel from it; returns the wheel."""
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT),
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: pathlib.Path) -> None:
    """Checks that the wheel contains the typed packages and nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    modules = [name for name in names if ".dist-info/" not in name]
    missing = {f"{package}/py.typed" for package in PACKAGES} - set(modules)
    strange = [
        name
        for name in modules
        if name.split("/")[0] not in PACKAGES
        or not name.endswith((".py", ".pyi", "py.typed", *DATA))
    ]
    if missing or strange:
        sys.exit(f"{wheel.name}: missing {sorted(missing)}, not expected {strange}")


def pinned_versions() -> str:
    """The lock file without hashes, which pip does not accept in a constraint."""
    lock = (ROOT / "requirements.lock").read_text()
    return "\n".join(re.findall(r"^(?![# ]).+?(?= \\$)", lock, re.MULTILINE))


def main() -> None:
    """Builds, installs and runs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        wheel = build(folder)
        check_contents(wheel)
        (folder / "constraints.txt").write_text(pinned_versions())
        away, scripts = folder / "away", folder / "venv" / "bin"
        away.mkdir()
        run(sys.executable, "-m", "venv", folder / "venv", cwd=away)
        run(
            *(scripts / "python", "-m", "pip", "install", "--quiet"),
            *("--disable-pip-version-check", "--constraint"),
            *(folder / "constraints.txt", wheel),
            cwd=away,
        )
        run(scripts / "python", "-m", "pip", "check", cwd=away)
        run(scripts / "python", "-c", IMPORT_ALL, cwd=away)
        for command in ("autopar", "autopar-solve"):
            run(scripts / command, "--help", cwd=away)
    print(f"{wheel.name} works outside the source tree.")


if __name__ == "__main__":
    main()
