"""``autopar profile``: measures the devices of this process."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


def profile(
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Where to save it; by default where planning looks for it."),
    ] = None,
    devices: options.Devices = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Join jax.distributed first; run it on every host at the same time.",
        ),
    ] = False,
) -> Result:
    """Measures the devices and their links, and saves the numbers for planning."""
    # They import JAX, which help must not.
    from autopar.cli import common
    from autopar.profiling import profile as profiling  # as it does

    if distributed:
        common.join_processes(devices)
    elif devices is not None:
        common.simulate_devices(devices)
    common.check_folder(out)
    with common.progress() as say:
        found = profiling.run(None if distributed else devices, say)
        path = profiling.save(found.cluster, out)
    return Result(f"{found}\n\nsaved to {path}")
