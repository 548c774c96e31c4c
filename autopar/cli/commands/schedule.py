"""``autopar schedule``: runs the jobs of a table on a cluster that they share."""

import pathlib
from typing import Annotated

import typer

from autopar.cli.options import BackendName
from autopar.cli.output import Result


def schedule(
    table: Annotated[
        pathlib.Path | None,
        typer.Argument(
            metavar="JOBS.toml",
            help="A table [[job]] for each job; without it, what was submitted.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="fifo, fair, tiresias, gavel, pollux, sia or goodput."
        ),
    ] = "goodput",
    state: Annotated[
        pathlib.Path,
        typer.Option(metavar="DIR", help="Where jobs and decisions are kept."),
    ] = pathlib.Path("autopar-jobs"),
    backend: Annotated[
        BackendName, typer.Option(help="Slots of this machine, or nodes of Ray.")
    ] = BackendName.LOCAL,
    address: Annotated[
        str,
        typer.Option(
            help="Of the Ray cluster; by default RAY_ADDRESS, or that of this machine."
        ),
    ] = "",
    nodes: Annotated[
        str,
        typer.Option(metavar="NxD", help="With local: so many nodes, and their slots."),
    ] = "1x2",
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Between two decisions, at the most."),
    ] = 10.0,
    react: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Decides so soon when a job comes or ends, or a node; 0: in every "
            "interval alone.",
        ),
    ] = 2.0,
    start: Annotated[
        float,
        typer.Option(
            "--start-cost",
            min=0.0,
            metavar="SECONDS",
            help="From the start of a job to its first step, for the policy.",
        ),
    ] = 20.0,
    change: Annotated[
        float,
        typer.Option(
            "--change-cost",
            min=0.0,
            metavar="SECONDS",
            help="Pause of a job that gets other devices, for the policy.",
        ),
    ] = 2.0,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Wait for `autopar jobs submit` when all ended."),
    ] = False,
) -> Result:
    """Runs jobs on a cluster that they share, until all have ended.

    Each job is a script that calls autopar.elastic. It is started, grown, shrunk and
    preempted as the policy decides. A scheduler that is killed goes on when it is
    started again with the same --state; jobs go on without it, until `autopar jobs
    cancel` ends them.
    """
    # They import JAX, which help must not.
    from autopar.cli import dispatching
    from autopar.errors import ScheduleError  # as they do

    if address and backend is not BackendName.RAY:
        raise ScheduleError("--address is that of a Ray cluster: add --backend ray.")
    asked = dispatching.DispatchRequest(
        jobs=table,
        stays=stay,
        state=state,
        policy=policy,
        backend=backend.value,
        address=address,
        nodes=nodes,
        interval_s=interval,
        react_s=react or None,
        start_s=start,
        change_s=change,
    )
    return dispatching.schedule(asked)
