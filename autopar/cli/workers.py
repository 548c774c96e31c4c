"""The work of ``autopar workers`` and ``autopar secret``."""

from __future__ import annotations

import json

import typer

from autopar.cli.commands.runs import RUN_FOLDER, SecretCommand, WorkersCommand
from autopar.cli.output import Result
from autopar.elastic.processes import certificates
from autopar.elastic.processes.records import command, ending_text, read_ending
from autopar.elastic.processes.stacks import stack_lines
from autopar.errors import PlanError
from autopar.units import number_of

_STOPS = "the run is asked to end: its workers end after the step that they are in"


def secret(asked: SecretCommand) -> Result:
    """Makes a secret for a run on several hosts."""
    certificates.create_secret(asked.file)
    return Result(
        f"{asked.file}: a new secret; copy it to each host, and keep it from others"
    )


def workers(asked: WorkersCommand) -> Result:
    """Shows the processes of a run, or asks its supervisor to change them."""
    place, wanted, stop, stacks = asked.place, None, asked.stop, asked.stacks
    if stacks and place is not None and str(place).isdigit():
        wanted, place = int(str(place)), None
    if place is not None and asked.folder != RUN_FOLDER:
        raise typer.BadParameter(f"give the folder once: --folder {asked.folder}.")
    folder = place or asked.folder  # in earlier releases the folder was an argument
    changes = [asked.processes is not None, asked.remove is not None, stop, stacks]
    if sum(changes) > 1:
        raise typer.BadParameter(
            "give one of --processes, --remove, --stop and --stacks."
        )
    if not any(changes) and (ended := read_ending(folder)) is not None:
        found = json.dumps({"ended": ended}, indent=1)
        return Result(found if asked.as_json else f"{folder}: {ending_text(ended)}")
    try:
        if asked.processes is not None:
            answer = command(folder, command="resize", processes=asked.processes)
            told = [f"asked for {asked.processes} processes"]
        elif asked.remove is not None:
            answer = command(folder, command="remove", worker=asked.remove)
            told = [f"worker {asked.remove} is asked to go"]
        elif stacks:
            answer, told = command(folder, command="stacks", worker=wanted), []
        else:
            answer = command(folder, command="stop" if stop else "status")
            told = [_STOPS] if stop else []
    except ConnectionRefusedError as error:
        raise PlanError(
            f"the supervisor of the run in {folder} does not run. Start `autopar run` "
            "with the same folder and script: it takes up the workers that are left, "
            "or goes on from the last checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise PlanError(f"no run in {folder}: {error}") from error
    if answer["wrong"]:
        raise PlanError(answer["wrong"])
    if stacks:
        missing = answer["missing"]
        if wanted is not None and missing:
            raise PlanError(missing[str(wanted)])
        found = json.dumps({k: answer[k] for k in ("stacks", "missing")}, indent=1)
        text = found if asked.as_json else "\n".join(stack_lines(answer))
        return Result(text, 1 if missing else 0)
    status = answer["status"]
    if asked.as_json:
        return Result(json.dumps(status, indent=1))
    lines = [
        f"worker {name}: {found['phase']}"
        + (f", step {found['step']}" if found["step"] >= 0 else "")
        + (f", process {found['pid']}" if found["pid"] else "")
        + (f" on {found['host']}" if found["host"] not in (None, "127.0.0.1") else "")
        + (f": {found['doing']}" if found["doing"] else "")
        for name, found in status["workers"].items()
    ]
    world = f"world of {number_of(len(status['world']), 'process')}"
    return Result("\n".join([*told, world, *lines, *status["hangs"]]))
