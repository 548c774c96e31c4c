"""Commands that start elastic runs on clusters that other programs manage."""

# Annotations are no strings here: typer reads them of functions that are wrapped.

import pathlib
from typing import Annotated

import typer

from autopar.cli.output import Result


def slurm(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py [ARGUMENT]...",
            help="The script, which calls autopar.elastic, and its own arguments.",
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(metavar="N|MIN-MAX", help="Fewest and most nodes, such as 2-8."),
    ],
    slots: Annotated[int, typer.Option(min=1, help="Workers of each node.")] = 1,
    time: Annotated[
        str, typer.Option(metavar="LIMIT", help="Time limit, such as 4:00:00.")
    ] = "",
    grace: Annotated[
        int,
        typer.Option(
            "--grace-signal",
            min=1,
            max=65535,
            help="Seconds before the time limit at which the state is saved.",
        ),
    ] = 120,
    folder: Annotated[
        pathlib.Path,
        typer.Option(help="The --folder of `autopar run`; all nodes have to see it."),
    ] = pathlib.Path("autopar-run"),
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Of sbatch, such as --partition=gpu. Repeatable."
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Of autopar run, such as --devices=4. Repeatable."
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write the batch script to a file, not to stdout."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the script to sbatch.")
    ] = False,
) -> Result:
    """Writes a Slurm batch script of an elastic run, or submits it.

    The job saves before its time limit and is requeued, on as many nodes as there are.
    """
    # They import NumPy, which help must not.
    from autopar.launching import slurm as launcher

    if not pathlib.Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]}.")
    job = launcher.SlurmJob(
        script=tuple(script),
        nodes=launcher.read_nodes(nodes),
        slots=slots,
        time=time,
        signal_s=grace,
        place=pathlib.Path.cwd(),
        folder=folder,
        sbatch=tuple(sbatch or ()),
        run=tuple(run or ()),
    )
    if out is not None:
        launcher.write_script(job, out)
    if submit:
        return Result(launcher.submit(job))
    return Result(launcher.job_script(job) if out is None else f"{out}: a batch script")
