"""The child process that compiles: it has its own backend, and ends after the
compilation.

    python -m autopar.compilers.child FOLDER

FOLDER holds ``request.json``, as `autopar.compilers.compiled.compile_for` writes it,
and ``module.mlirbc``. The process writes ``program.txt`` and ``memory.json``, or
``error.txt`` with the compiler's message.
"""

from __future__ import annotations

import json
import pathlib
import sys

from autopar_passes import jax_compat


def main(folder: pathlib.Path) -> int:
    """Compiles the program in a folder; returns 1 if the compiler refuses it."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        program, memory = jax_compat.compile_without_devices(
            (folder / "module.mlirbc").read_bytes(),
            platform=request["platform"],
            topology=request["topology"],
            description=request["description"],
            devices=request["devices"],
        )
    # The compiler may raise any exception; the parent process reports it.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (folder / "error.txt").write_text(text, encoding="utf-8")
        return 1
    (folder / "program.txt").write_text(program, encoding="utf-8")
    (folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
