"""``autopar plan``: finds the plan of a step on a cluster."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning()
def plan(
    target: options.Target,
    words: options.Words = None,
    cluster: options.ClusterSpec = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Where to save the plan as JSON.")
    ] = None,
    as_json: options.Json = False,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where to write a page about the plan.")
    ] = None,
    memory: options.Memory = None,
    explain_search: Annotated[
        bool,
        typer.Option(
            "--explain-search", help="Also print what was proposed, and how fast it is."
        ),
    ] = False,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Where to write the predicted schedule of stages, for Perfetto."
        ),
    ] = None,
    *,
    asked: options.Asked,
) -> Result:
    """Finds the fastest plan of a train step on a cluster, and prints it.

    The target's function returns (train_step, state, batch); arrays may be
    jax.ShapeDtypeStruct, so nothing of the model's size is allocated.
    """
    # They import JAX, which help must not.
    from autopar.cli import common, planning

    for path in (out, html, trace):
        common.check_folder(path)
    common.import_target(target)
    return planning.plan(
        target,
        words or [],
        cluster=common.read_cluster(cluster, memory),
        limits=asked,
        out=out,
        html=html,
        trace=trace,
        explain_search=explain_search,
        as_json=as_json,
    )
