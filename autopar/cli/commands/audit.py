"""``autopar audit``: what the compiler will really communicate, against the plan."""

from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning()
def audit(
    source: options.PlanOrTarget,
    words: options.PlanWords = None,
    cluster: options.ClusterSpec = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile for simulated devices too; slower."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Compile with the compiler of h100, a100, b200, v5e or v5p.",
        ),
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed. With --compile the step is also compiled for simulated
    CPU devices, and the memory of the compiled step is read. With --target it is
    compiled with the accelerator's own compiler instead, which an extra installs.
    """
    # They import JAX, which help must not.
    from autopar.cli import auditing

    return auditing.audit(
        source,
        words,
        cluster=cluster,
        limits=asked,
        compiled=compiled and target is None,
        target=target,
        as_json=as_json,
    )
