"""The child process that compiles programs with a JAX backend of its own, and then
ends.

    python -m autopar.compilers.child FOLDER

FOLDER holds ``request.json``, as `autopar.compilers.compiled.compile_for` writes it,
and the modules ``0.mlirbc``, ``1.mlirbc`` ... For each module the process writes the
compiled program, such as ``0.txt``, and the memory that it needs, such as ``0.json``.
If the compiler refuses a module, the process writes the compiler's message to
``error.txt``.
"""

from __future__ import annotations

import json
import pathlib
import sys

from autopar_passes import jax_compat


def main(folder: pathlib.Path) -> int:
    """Compiles the programs in a folder; returns 1 if the compiler refuses one."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    modules = (
        (folder / f"{k}.mlirbc").read_bytes() for k in range(request["programs"])
    )
    try:
        found = jax_compat.compile_without_devices(
            modules,
            platform=request["platform"],
            topology=request["topology"],
            description=request["description"],
            devices=request["devices"],
        )
        for k, (program, memory) in enumerate(found):
            (folder / f"{k}.txt").write_text(program, encoding="utf-8")
            (folder / f"{k}.json").write_text(json.dumps(memory), encoding="utf-8")
    # The compiler may raise any exception. The parent process reports it to the user.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (folder / "error.txt").write_text(text, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
