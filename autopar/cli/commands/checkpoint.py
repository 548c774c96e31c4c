"""``autopar checkpoint``: what is in a checkpoint, whether it is whole, conversions."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result

_Directory = Annotated[
    pathlib.Path,
    typer.Argument(metavar="DIR", help="A checkpoint, or a directory of them."),
]
_Step = Annotated[
    int | None, typer.Option(min=0, help="Which of a directory; default: the last.")
]


def show(
    directory: _Directory,
    step: _Step = None,
    as_json: options.Json = False,
) -> Result:
    """Shows the checkpoints of a directory, and what is in the last or a given one.

    Saves that did not end are named.
    """
    # They import JAX, which help must not.
    from autopar.cli import checkpointing

    return checkpointing.show(directory, step, as_json)


def verify(
    directory: _Directory,
    step: _Step = None,
    as_json: options.Json = False,
) -> Result:
    """Reads every array of the checkpoints, and compares it with its checksum.

    The exit code is 1 where one is damaged.
    """
    # They import JAX, which help must not.
    from autopar.cli import checkpointing

    return checkpointing.verify(directory, step, as_json)


def convert(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(metavar="DIR", help="A checkpoint, a directory, or atoms."),
    ],
    target: Annotated[pathlib.Path, typer.Argument(help="What is written.")],
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="safetensors, atoms or checkpoint."),
    ],
    step: _Step = None,
    like: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="DIR", help="From atoms: a checkpoint of the model."),
    ] = None,
    names: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="From atoms: JSON, name of a parameter -> its name there.",
        ),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(min=0, help="From atoms: number of samples consumed."),
    ] = None,
    as_json: options.Json = False,
) -> Result:
    """Writes the parameters as safetensors, or DeepSpeed's atoms, or reads these."""
    # They import JAX, which help must not.
    from autopar.cli import checkpointing

    return checkpointing.convert(
        directory,
        target,
        to,
        step=step,
        like=like,
        names=names,
        position=position,
        as_json=as_json,
    )
