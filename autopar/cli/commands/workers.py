"""``autopar workers``: shows and changes the processes of a run."""

import json
import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result

_FOLDER = pathlib.Path("autopar-run")
_STOPS = "the run is asked to end: its workers end after the step that they are in"


def workers(
    place: Annotated[
        pathlib.Path | None, typer.Argument(metavar="FOLDER", hidden=True)
    ] = None,
    *,
    folder: Annotated[
        pathlib.Path, typer.Option(help="The --folder of `autopar run`.")
    ] = _FOLDER,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="How many processes there should be."),
    ] = None,
    remove: Annotated[
        int | None, typer.Option(min=0, help="The number of a worker that should go.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the run.")] = False,
    as_json: options.Json = False,
) -> Result:
    """Shows the processes of a run, and adds or removes some."""
    # They import NumPy, which help must not.
    from autopar.elastic.processes.records import (
        command,
        ending_text,
        read_ending,
    )
    from autopar.errors import PlanError  # as it does
    from autopar.units import number_of  # as it does

    if place is not None and folder != _FOLDER:
        raise typer.BadParameter(f"give the folder once: --folder {folder}.")
    folder = place or folder  # one without --folder is of an earlier release
    asked = [processes is not None, remove is not None, stop]
    if sum(asked) > 1:
        raise typer.BadParameter("give one of --processes, --remove and --stop.")
    if not any(asked) and (ended := read_ending(folder)) is not None:
        found = json.dumps({"ended": ended}, indent=1)
        return Result(found if as_json else f"{folder}: {ending_text(ended)}")
    try:
        if processes is not None:
            answer = command(folder, command="resize", processes=processes)
            told = [f"asked for {processes} processes"]
        elif remove is not None:
            answer = command(folder, command="remove", worker=remove)
            told = [f"worker {remove} is asked to go"]
        else:
            answer = command(folder, command="stop" if stop else "status")
            told = [_STOPS] if stop else []
    except (OSError, ValueError) as error:
        raise PlanError(f"no run in {folder}: {error}") from error
    if answer["wrong"]:
        raise PlanError(answer["wrong"])
    status = answer["status"]
    if as_json:
        return Result(json.dumps(status, indent=1))
    lines = [
        f"worker {name}: {found['phase']}"
        + (f", step {found['step']}" if found["step"] >= 0 else "")
        for name, found in status["workers"].items()
    ]
    world = f"world of {number_of(len(status['world']), 'process')}"
    return Result("\n".join([*told, world, *lines]))
