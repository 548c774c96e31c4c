"""``autopar explain``: why a plan is as it is."""

from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning(without=("seconds",))
def explain(
    source: options.PlanOrTarget,
    words: options.PlanWords = None,
    tensor: Annotated[
        str | None,
        typer.Option(help="Inputs to explain, such as 'state/params/*/kernel'."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--alternatives", min=0, help="Other layouts to try of each.")
    ] = 6,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit of the solver for each layout.")
    ] = 3.0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="{operator,layer}", help="Attribute the whole step to these."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --by: most rows; others are added up.")
    ] = 20,
    cluster: options.ClusterSpec = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Says where a step's time and memory go, or why an input lies as it does.

    With --by: the work and communication of each operator or layer, what of it is
    hidden, and the rest; the rows add up to the step. With --tensor: the layout of
    each input that matches, the communication that it causes, and what the step
    would take with other layouts, everything else planned again; and how its
    gradient is sent, beside other codecs.
    """
    # They import JAX, which help must not.
    from autopar.cli import explaining

    return explaining.explain(
        source,
        words,
        tensor=tensor,
        by=by,
        top=top,
        limit=limit,
        seconds=seconds,
        cluster=cluster,
        limits=asked,
        as_json=as_json,
    )
