"""``autopar ledger``: the re-plans of an elastic run."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


def ledger(
    file: Annotated[
        pathlib.Path, typer.Argument(metavar="FILE", help="A ledger.jsonl.")
    ],
    as_json: options.Json = False,
) -> Result:
    """Says what an elastic run re-planned for, what it compared, and what that cost.

    A run writes the file where autopar.elastic or autopar.train is given ledger=.
    """
    # They import JAX, which help must not.
    from autopar.cli import ledgering

    return ledgering.ledger(file, as_json)
