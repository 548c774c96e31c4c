"""``autopar diff``: what differs between two plans."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


def diff(
    one: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A plan.json.")],
    other: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: options.Json = False,
) -> Result:
    """Says what differs between two plans: mesh, costs, layouts and codecs.

    The exit code is 1 where they differ, but for how long planning took.
    """
    # They import JAX, which help must not.
    from autopar.cli import differing

    return differing.diff(one, other, as_json)
