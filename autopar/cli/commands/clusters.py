"""Commands for jobs on clusters, and for checks and profiles of a machine."""

# This module does not import `annotations` from `__future__`: typer reads annotations
# of wrapped functions, and cannot read strings there.

import os
import pathlib
import uuid
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.options import BackendName
from autopar.cli.output import Result

_State = Annotated[
    pathlib.Path,
    typer.Option("--state", metavar="DIR", help="The scheduler's --state."),
]
_Names = Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of jobs.")]
_Name = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job.")]
_At = Annotated[
    str,
    typer.Option(
        "--at",
        metavar="HOST:PORT",
        help="At a scheduler on another machine: where its --listen is.",
    ),
]
_Secret = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Made by `autopar secret`; by default the text of AUTOPAR_SECRET.",
    ),
]
_Quota = Annotated[
    list[str] | None,
    typer.Option(
        metavar="USER=N", help="The most devices that a user's jobs hold together."
    ),
]
_Share = Annotated[
    list[str] | None,
    typer.Option(
        metavar="USER=WEIGHT", help="A user's weight under fair and goodput; else 1."
    ),
]
_DEFAULT = pathlib.Path("autopar-jobs")


def list_(
    folder: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="The scheduler's --state.")
    ] = _DEFAULT,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Print every decision, and why.")
    ] = False,
    at: _At = "",
    secret: _Secret = None,
    as_json: options.Json = False,
) -> Result:
    """Lists the jobs of a scheduler, and says whether it runs; `autopar jobs DIR`."""
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import owning, remote

    if at:
        there = remote.SchedulerAt.of(at, secret)
        return there.run("jobs", decisions=decisions, as_json=as_json)
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
    user: Annotated[
        str, typer.Option(help="Whose a script's job is; by default yours.")
    ] = "",
    priority: Annotated[
        float, typer.Option(help="Its weight beside other jobs of its user.")
    ] = 1.0,
    submission: Annotated[
        str,
        typer.Option(
            "--id", help="With --at: of the submission; the same is taken once."
        ),
    ] = "",
    at: _At = "",
    secret: _Secret = None,
) -> Result:
    """Submits jobs, whether or not a scheduler runs.

    With --at, the jobs go to a scheduler on another machine. Paths are then paths on
    that machine, and the script and the curve must exist there.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import owning, remote
    from autopar.errors import ScheduleError  # late, like the others

    if submission and not at:
        raise ScheduleError("--id is of a submission elsewhere: add --at HOST:PORT.")

    asked = owning.Submitted(
        file=file,
        words=tuple(words or ()),
        state=state,
        name=name,
        devices=devices,
        guaranteed=guaranteed,
        user=user,
        priority=priority,
        submission=submission or uuid.uuid4().hex,
    )
    if at:
        return remote.SchedulerAt.of(at, secret).submit(asked)
    return owning.submit(asked)


def cancel(
    names: _Names, state: _State = _DEFAULT, at: _At = "", secret: _Secret = None
) -> Result:
    """Ends jobs for good; the files that they saved stay in their folders."""
    return _wish(names, "cancel", state, at, secret)


def hold(
    names: _Names, state: _State = _DEFAULT, at: _At = "", secret: _Secret = None
) -> Result:
    """Saves and stops jobs; they wait until they are released."""
    return _wish(names, "hold", state, at, secret)


def release(
    names: _Names, state: _State = _DEFAULT, at: _At = "", secret: _Secret = None
) -> Result:
    """Lets jobs that were held run again."""
    return _wish(names, "", state, at, secret)


def _wish(
    names: list[str],
    wish: str,
    state: pathlib.Path,
    at: str,
    secret: pathlib.Path | None,
) -> Result:
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import owning, remote

    if at:
        there = remote.SchedulerAt.of(at, secret)
        return there.run("wish", names=names, wish=wish)
    return owning.wish(state, names, wish)


def logs(
    name: _Name,
    state: _State = _DEFAULT,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=1, help="So many of the last lines.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print what comes, to the job's end.")
    ] = False,
    at: _At = "",
    secret: _Secret = None,
) -> Result:
    """Prints what a job printed."""
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import owning, remote
    from autopar.errors import ScheduleError  # late, like the others

    if at and follow:
        raise ScheduleError("--follow works beside the scheduler: leave out --at.")
    if at:
        there = remote.SchedulerAt.of(at, secret)
        return there.run("logs", names=[name], lines=lines)
    return owning.logs(state, name, lines, follow=follow)


def show(
    name: _Name,
    state: _State = _DEFAULT,
    at: _At = "",
    secret: _Secret = None,
    as_json: options.Json = False,
) -> Result:
    """Shows everything about a job: its devices, times, decisions and output."""
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import owning, remote

    if at:
        there = remote.SchedulerAt.of(at, secret)
        return there.run("show", names=[name], as_json=as_json)
    return owning.show(state, name, as_json=as_json)


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
    quota: _Quota = None,
    share: _Share = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Take `autopar jobs ... --at` of other machines here.",
        ),
    ] = "",
    secret: _Secret = None,
) -> Result:
    """Runs jobs on a cluster that they share, until all have ended.

    Each job is a script that calls autopar.elastic. The policy decides when a job
    starts, gets more or fewer devices, or is preempted. If the scheduler is killed, the
    jobs go on, and `autopar jobs cancel` can end them. A scheduler that is started
    again with the same --state finds its jobs.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import dispatching
    from autopar.errors import ScheduleError  # late, like the others

    if address and backend is not BackendName.RAY:
        raise ScheduleError("--address is that of a Ray cluster: add --backend ray.")
    if secret is not None and not listen:
        raise ScheduleError("--secret is for other hosts: add --listen HOST:PORT.")
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
        quotas=tuple(quota or ()),
        shares=tuple(share or ()),
        listen=listen,
        secret=secret,
    )
    return dispatching.schedule(asked)


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
    quota: _Quota = None,
    share: _Share = None,
    as_json: options.Json = False,
) -> Result:
    """Simulates the jobs of a trace on a cluster, and prints how long they took.

    The trace is one of those published with Pollux or Rubick, a table with name,
    submitted_s, devices and duration_s, Philly's cluster_job_log or philly.csv, or the
    output of sacct -P. The exit code is 3 if some jobs could not run.
    """
    # Policies fit models with only a few parameters, so threads of linear algebra
    # mostly wait for each other: 7 of 8 CPU seconds with Pollux's policy. SciPy reads
    # the variable when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # This module imports NumPy and SciPy, which `--help` must not import.
    from autopar.cli import dispatching

    asked = dispatching.SimulationRequest(
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
        quotas=tuple(quota or ()),
        shares=tuple(share or ()),
    )
    return dispatching.run_simulation(asked, as_json=as_json)


def profile(
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Where to save it; by default where planning looks for it."),
    ] = None,
    devices: options.Devices = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Join jax.distributed first; run it on every host at the same time.",
        ),
    ] = False,
) -> Result:
    """Measures the devices and their links, and saves the numbers for planning."""
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import common
    from autopar.profiling import profile as profiling  # late, like the others

    if distributed:
        common.join_processes(devices)
    elif devices is not None:
        common.simulate_devices(devices)
    common.check_folder(out)
    with common.progress() as say:
        found = profiling.run(None if distributed else devices, say)
        path = profiling.save(found.cluster, out)
    return Result(f"{found}\n\nsaved to {path}")


def doctor(devices: options.Devices = None, as_json: options.Json = False) -> Result:
    """Checks versions, devices, threads, names and caches of this machine.

    For each problem it says what to do. The exit code is 1 if something is wrong.
    """
    # These modules import JAX, which `--help` must not import.
    from autopar.cli import common, examining

    if devices is not None:
        common.simulate_devices(devices)
    return examining.doctor(as_json)
