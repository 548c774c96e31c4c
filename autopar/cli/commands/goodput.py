"""``autopar goodput``: what a step makes of configurations of devices."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning(without=("layouts", "microbatches", "stages", "schedule"))
def goodput(
    target: options.Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [CLUSTER]...",
            help="Arguments of the target's function, and more clusters.",
        ),
    ] = None,
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--clusters",
            metavar="SPEC...",
            help="Such as 1:h100 2:h100 8x8:h100, or 1..8x8:h100. Repeatable.",
        ),
    ] = None,
    noise_scale: Annotated[
        float | None,
        typer.Option(min=0.0, help="Noise scale of the gradients, in rows."),
    ] = None,
    base_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the base batch; the target's otherwise."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of the largest batch.")
    ] = None,
    memory: options.Memory = None,
    anew: Annotated[
        bool,
        typer.Option(
            "--anew", help="Plan each cluster from nothing, not from its neighbour."
        ),
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Plan in so many processes.")
    ] = None,
    cache: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder that keeps plans for the next time."),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Where to save the curve as JSON.")
    ] = None,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where to write a page with a picture.")
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Finds the best plan, batch and codecs of a train step on several clusters.

    Goodput is rows of the base batch per second: larger batches train with more rows
    per second, and each row is worth less, as the noise scale says. A cluster on which
    nothing runs has a row with the reason.
    """
    # They import JAX, which help must not.
    from autopar.cli import common, curving

    for path in (out, html):
        common.check_folder(path)
    pairs, more = curving.told_apart(words or [])
    wanted = curving.CurveRequest(
        target=target,
        words=tuple(pairs),
        noise_scale=noise_scale,
        base_batch=base_batch,
        max_batch=max_batch,
        options=asked,
        cache=cache,
        anew=anew,
    )
    return curving.goodput(
        wanted,
        clusters=[*(clusters or []), *more],
        memory=memory,
        processes=processes,
        out=out,
        page=html,
        as_json=as_json,
    )
