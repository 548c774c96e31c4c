"""``autopar run``: runs a training script in several processes."""

import pathlib
from typing import Annotated

import typer

from autopar.cli.options import BackendName
from autopar.cli.output import Result


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py [ARGUMENT]...",
            help="The script, which calls autopar.elastic, and its own arguments.",
        ),
    ],
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="How many processes to start.")
    ] = 2,
    least: Annotated[
        int, typer.Option("--min", min=1, help="Fewest processes to go on with.")
    ] = 1,
    most: Annotated[
        int, typer.Option("--max", min=1, help="Most processes that may be asked for.")
    ] = 64,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Simulate this many CPU devices in each process."),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(min=0, help="How many processes that died are replaced, in all."),
    ] = 0,
    folder: Annotated[
        pathlib.Path,
        typer.Option(help="Where the run keeps its state, log, plans and programs."),
    ] = pathlib.Path("autopar-run"),
    silence: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds without a word after which a process is killed."
        ),
    ] = 15.0,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds that processes go on without a supervisor."),
    ] = 60.0,
    collective: Annotated[
        int,
        typer.Option(
            "--collective-timeout",
            min=1,
            help="Seconds that a process waits for another one in a collective.",
        ),
    ] = 10,
    ahead: Annotated[
        bool,
        typer.Option(help="Prepare programs of likely next worlds in a process more."),
    ] = True,
    backend: Annotated[
        BackendName,
        typer.Option(help="Run them on this machine, or as actors on a Ray cluster."),
    ] = BackendName.LOCAL,
    address: Annotated[
        str,
        typer.Option(
            help="Of the Ray cluster; by default RAY_ADDRESS, or that of this machine."
        ),
    ] = "",
) -> Result:
    """Runs a training script in several processes, which may go and come.

    A process that dies is left out, and the others go on; `autopar workers` changes
    their number. A run whose supervisor was killed is taken up by the same command.
    On a Ray cluster, a node that joins takes a process more.
    """
    # They import JAX, which help must not.
    from autopar.backends.ray import RayLauncher  # as they do
    from autopar.elastic.processes import runner  # as they do
    from autopar.elastic.processes.members import MemberLimits  # as they do

    if not least <= processes <= most:
        raise typer.BadParameter(
            f"--processes {processes} is not within --min {least} and --max {most}."
        )
    if not pathlib.Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]}.")
    job = runner.RunJob(
        command=runner.python_command(script),
        limits=MemberLimits(
            processes=processes,
            least=least,
            most=most,
            restarts=restarts,
            silent_s=silence,
        ),
        folder=folder,
        devices=devices,
        grace_s=grace,
        ahead=ahead,
        collective_s=collective,
    )
    if address and backend is not BackendName.RAY:
        raise typer.BadParameter("--address is that of a cluster: add --backend ray.")
    ray = backend is BackendName.RAY
    launcher = RayLauncher(script, processes, address) if ray else None
    made = runner.Runner(job, launcher)
    code = made.run()
    return Result(made.summary(), code)
