"""``autopar sweep``: plans over batches, models and numbers of devices."""

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning()
def sweep(
    target: options.Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=RANGE]...",
            help="Arguments of the target's function: 8,16 or 8..64, which doubles, or "
            "8..32+8, in steps.",
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="SPEC",
            help="Such as 8x8:h100, or 1..8x8:h100 for several. Repeatable.",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Find the largest value that fits, of batch for example.",
        ),
    ] = None,
    efficiency: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="The least of devices that are worth it."),
    ] = 0.7,
    memory: options.Memory = None,
    cache: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder that keeps plans for the next sweep."),
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Iterator[Result]:
    """Plans a train step for ranges of its options, on several clusters.

    The table has a row for each combination. Below it stands how many devices are
    worth it: the most whose efficiency, the speed-up over one device for each device,
    is high enough. Ctrl-C ends the sweep and prints what is done.
    """
    # They import JAX, which help must not.
    from autopar.cli import sweeping

    return sweeping.sweep(
        target,
        words or [],
        clusters=cluster or [],
        memory=memory,
        limits=asked,
        share=efficiency,
        sized=largest,
        cache=cache,
        as_json=as_json,
    )
