"""``autopar jobs``: the jobs of a scheduler."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


def jobs(
    folder: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="The scheduler's --state.")
    ] = pathlib.Path("autopar-jobs"),
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Print every decision, and why.")
    ] = False,
    as_json: options.Json = False,
) -> Result:
    """Lists the jobs of `autopar schedule`, whether or not it runs."""
    # They import JAX, which help must not.
    from autopar.cli import dispatching

    return dispatching.jobs(folder, decisions=decisions, as_json=as_json)
