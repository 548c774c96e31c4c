"""``autopar jobs``: the jobs of a scheduler."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result

_State = Annotated[
    pathlib.Path,
    typer.Option("--state", metavar="DIR", help="The scheduler's --state."),
]
_Names = Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of jobs.")]
_Name = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.")]
_DEFAULT = pathlib.Path("autopar-jobs")


def list_(
    folder: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="The scheduler's --state.")
    ] = _DEFAULT,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Print every decision, and why.")
    ] = False,
    as_json: options.Json = False,
) -> Result:
    """Lists the jobs of a scheduler, and says whether it runs; `autopar jobs DIR`."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.jobs(folder, decisions=decisions, as_json=as_json)


def submit(
    file: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="JOBS.toml|SCRIPT.py", help="A table of jobs, or one job's script."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="Of the script, after --."),
    ] = None,
    state: _State = _DEFAULT,
    name: Annotated[
        str, typer.Option(help="Of a script's job; the script's by default.")
    ] = "",
    devices: Annotated[
        int, typer.Option(min=1, help="That a script's job asks for.")
    ] = 1,
    guaranteed: Annotated[
        bool,
        typer.Option(
            "--guaranteed", help="A script's job is promised the speed it asks for."
        ),
    ] = False,
) -> Result:
    """Hands in jobs, whether or not a scheduler runs."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    asked = owning.Submitted(
        file=file,
        words=tuple(words or ()),
        state=state,
        name=name,
        devices=devices,
        guaranteed=guaranteed,
    )
    return owning.submit(asked)


def cancel(names: _Names, state: _State = _DEFAULT) -> Result:
    """Ends jobs for good; what they saved stays in their folders."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.wish(state, names, "cancel")


def hold(names: _Names, state: _State = _DEFAULT) -> Result:
    """Has jobs saved and stopped; they wait until they are released."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.wish(state, names, "hold")


def release(names: _Names, state: _State = _DEFAULT) -> Result:
    """Lets jobs that were held run again."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.wish(state, names, "")


def logs(
    name: _Name,
    state: _State = _DEFAULT,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=1, help="So many of the last lines.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print what comes, to the job's end.")
    ] = False,
) -> Result:
    """Prints what a job printed."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.logs(state, name, lines, follow=follow)


def show(
    name: _Name, state: _State = _DEFAULT, as_json: options.Json = False
) -> Result:
    """Shows all that is known of a job: its devices, times, decisions and output."""
    # It imports JAX, which help must not.
    from autopar.cli import owning

    return owning.show(state, name, as_json=as_json)
