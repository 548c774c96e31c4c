"""``autopar compare``: the plan beside those that people write by hand."""

from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning()
def compare(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A target, or a plan.json.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN]... [KEY=VALUE]...",
            help="Other saved plans of the step; arguments of the target's function.",
        ),
    ] = None,
    cluster: options.ClusterSpec = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the plans on this process's devices.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Turns of three timed steps for each plan.")
    ] = 5,
    devices: options.Devices = None,
    memory: options.Memory = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Compares the plan with the usual ones: data parallel, ZeRO, tensor parallel ...

    With --stages, pipelines of equal stages stand beside the plans of one stage, each
    with replicas or with tensors split within a host. --schedule and --microbatches
    hold for them, too.
    Saved plans are compared as they are, on the cluster that they are for.

    With --compression only the plan has codecs, the usual ones have none.
    With --measure all that fit are really run, on this process's devices; for a
    cluster of CPU devices they are simulated.
    """
    # They import JAX, which help must not.
    from autopar.cli import common, comparing

    if devices is not None:
        common.simulate_devices(devices)
    common.import_target(target)
    return comparing.compare(
        target,
        words or [],
        cluster=comparing.cluster_said(cluster, memory),
        limits=asked,
        repeats=repeats if measure else 0,
        as_json=as_json,
    )
