"""``autopar simulate``: the jobs of a trace under a policy."""

import os
import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


def simulate(
    trace: Annotated[
        pathlib.Path,
        typer.Argument(help="A CSV file, the output of sacct -P, or Philly's JSON."),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="Nodes x devices, such as 16x4, or 6x4:t4+2x8:a100 for two kinds.",
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="fifo, fair, tiresias, optimus, gavel, pollux, sia, rubick, goodput.",
        ),
    ] = "goodput",
    tables: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]DIR",
            help="The folder of measured tables, or one for each kind of devices; "
            "../traces beside the trace's folder by default.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between two decisions.")
    ] = 60.0,
    react: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Decides so soon when a job comes or ends, or a node; 0: in every "
            "interval alone, as published simulators do.",
        ),
    ] = 0.0,
    restart: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="What a move takes; as in the published simulator by default.",
        ),
    ] = None,
    interference: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Of its speed, what a job on several nodes loses beside another.",
        ),
    ] = 0.0,
    away: Annotated[
        pathlib.Path | None,
        typer.Option(help="A CSV file of nodes that leave and come back."),
    ] = None,
    page: Annotated[
        pathlib.Path | None,
        typer.Option("--html", help="Write a page with the timeline of devices."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every decision.")
    ] = False,
    as_json: options.Json = False,
) -> Result:
    """Simulates the jobs of a trace on a cluster, and tells how long they took.

    The trace is one of those published with Pollux or Rubick, a table with name,
    submitted_s, devices and duration_s, Philly's cluster_job_log or philly.csv, or what
    sacct -P prints. The exit code is 3 where jobs could not run.
    """
    # Fits are of a few numbers: threads of linear algebra only wait for each other, for
    # 7 of 8 CPU seconds of Pollux's policy. It is read when SciPy is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # It imports NumPy and SciPy, which help must not.
    from autopar.cli import simulating

    asked = simulating.SimulationRequest(
        trace=trace,
        cluster=cluster,
        policy=policy,
        tables=tuple(tables or ()),
        interval_s=interval,
        react_s=react or None,
        restart_s=restart,
        interference=interference,
        away=away,
        page=page,
        explain=explain,
    )
    return simulating.run_simulation(asked, as_json=as_json)
