"""The commands simulate, schedule and jobs, for clusters that several jobs share."""

import pathlib
from typing import ClassVar

from autopar.cli.options import (
    ClusterName,
    JsonOptions,
    SecretOptions,
    argument,
    command,
    option,
    record,
)

_STATE = pathlib.Path("autopar-jobs")


@record
class UserOptions:
    """Limits and weights of the users of a cluster.

    Attributes:
      quota: The most devices that all jobs of a user may have together.
      share: A user's weight relative to other users, for fair and goodput; 1 by
        default.
    """

    quota: list[str] | None = option(None, metavar="USER=N")
    share: list[str] | None = option(None, metavar="USER=WEIGHT")


@record
class RemoteOptions(SecretOptions):
    """The scheduler that a command addresses.

    Attributes:
      at: The --listen address of a scheduler on another machine, followed by those at
        which it may be started again.
    """

    at: str = option("", metavar="HOST:PORT[,...]")


@record
class StateOptions(RemoteOptions):
    """The state of the scheduler that a command addresses.

    Attributes:
      state: The folder of the scheduler's state, its --state.
    """

    state: pathlib.Path = option(_STATE, metavar="DIR")


@record
class WishOptions(StateOptions):
    """The jobs that a command changes.

    Attributes:
      names: Names of jobs.
    """

    wish: ClassVar[str] = ""
    names: list[str] = argument(metavar="JOB...")


# Policies fit models with only a few parameters, so threads of linear algebra mostly
# wait for each other: 7 of 8 CPU seconds with Pollux's policy.
@command(
    "simulate",
    "dispatching.run_simulation",
    "simulate workload-6.csv --cluster 16x4 --policy tiresias",
    environment={"OPENBLAS_NUM_THREADS": "1"},
)
class SimulateCommand(UserOptions, JsonOptions):
    """Simulates the jobs of a trace on a cluster, and prints how long they took.

    The trace is one of those published with Pollux or Rubick, a table with name,
    submitted_s, devices and duration_s, Philly's cluster_job_log or philly.csv, or the
    output of sacct -P. The exit code is 3 if some jobs cannot run.

    Attributes:
      trace: A CSV file, the output of sacct -P, or Philly's JSON.
      cluster: Nodes x devices of each node, such as 16x4, or 6x4:t4+2x8:a100 for two
        kinds.
      policy: The policy: fifo, fair, tiresias, optimus, gavel, pollux, sia, rubick or
        goodput.
      tables: The folder of measured tables, or one folder for each kind of devices; by
        default ../traces, relative to the trace's folder.
      interval: Seconds between two decisions.
      react: Seconds within which the policy also decides after a job or a node comes or
        goes; 0: it decides only every --interval, as in published simulators.
      restart: Seconds for which a job does not train when its devices change; by
        default as in the published simulator.
      interference: The fraction of its speed that a job on several nodes loses if it
        shares a node with another such job.
      away: A CSV file of nodes that leave and come back.
      page: Write an HTML page with the timeline of devices to this file.
      explain: Print every decision with its reasons.
    """

    trace: pathlib.Path = argument()
    cluster: str = option(metavar="SPEC")
    policy: str = option("goodput", metavar="NAME")
    tables: list[str] | None = option(None, metavar="[KIND=]DIR")
    interval: float = option(60.0, metavar="SECONDS")
    react: float = option(0.0, metavar="SECONDS")
    restart: float | None = option(None, metavar="SECONDS")
    interference: float = option(0.0, metavar="SHARE")
    away: pathlib.Path | None = None
    page: pathlib.Path | None = option(None, "--html")
    explain: bool = False


@command(
    "schedule",
    "dispatching.schedule",
    "schedule jobs.toml --policy goodput --state runs --nodes 1x4",
)
class ScheduleCommand(UserOptions, SecretOptions):
    """Runs jobs that share a cluster, until all have ended.

    Each job is a script that calls autopar.elastic. The policy decides when a job
    starts, gets more or fewer devices, or is preempted. If the scheduler is killed, the
    jobs continue, and `autopar jobs cancel` can end them. A scheduler that is started
    again with the same --state finds its jobs.

    Attributes:
      table: A TOML file with a table [[job]] for each job; without it, submitted jobs
        run.
      policy: The policy: fifo, fair, tiresias, gavel, pollux, sia or goodput.
      state: The folder in which jobs and decisions are stored.
      backend: Where jobs run: slots of this machine, nodes of a Ray cluster, or hosts
        whose `autopar worker` connects to --listen.
      address: The address of the Ray cluster; by default RAY_ADDRESS, or the cluster of
        this machine.
      nodes: With local: number of nodes and of slots on each. With hosts: the cluster
        for which curves are planned.
      interval: Most seconds between two decisions.
      react: Seconds within which the policy decides after a job or a node comes or
        goes; 0: it decides only every --interval.
      start: Seconds from a job's start to its first step, as the policy assumes.
      change: Seconds of the pause of a job whose devices change, as the policy assumes.
      grace: With hosts: seconds for which jobs train on if this host is lost.
      stay: After all jobs have ended, wait for `autopar jobs submit`.
      listen: Accept hosts, and `autopar jobs ... --at` of other machines, at this
        address.
    """

    table: pathlib.Path | None = argument(None, metavar="JOBS.toml")
    policy: str = option("goodput", metavar="NAME")
    state: pathlib.Path = option(_STATE, metavar="DIR")
    backend: ClusterName = ClusterName.LOCAL
    address: str = ""
    nodes: str = option("1x2", metavar="NxD")
    interval: float = option(10.0, metavar="SECONDS")
    react: float = option(2.0, metavar="SECONDS")
    start: float = option(20.0, "--start-cost", metavar="SECONDS", min=0.0)
    change: float = option(2.0, "--change-cost", metavar="SECONDS", min=0.0)
    grace: float = option(15.0, metavar="SECONDS", min=0.0)
    stay: bool = False
    listen: str = option("", metavar="HOST:PORT")


@command("jobs list", "remote.jobs", "jobs runs")
class ListCommand(RemoteOptions, JsonOptions):
    """Lists the jobs of a scheduler, and says whether the scheduler runs.

    Attributes:
      folder: The folder of the scheduler's state, its --state.
      decisions: Print every decision and its reason.
    """

    folder: pathlib.Path = argument(_STATE, metavar="DIR")
    decisions: bool = False


@command(
    "jobs submit", "remote.submit", "jobs submit train.py --devices 2 -- --rate 0.1"
)
class SubmitCommand(StateOptions):
    """Submits jobs, whether or not a scheduler runs.

    With --at, the jobs go to a scheduler on another machine. Paths are then paths on
    that machine, and the script and the curve must exist there.

    Attributes:
      file: A table of jobs, or one job's script.
      words: Arguments of the script, after --.
      name: Name of the job of a script; by default the script's name.
      devices: Number of devices that the job of a script requests.
      guaranteed: Promise the job of a script the speed that it has on the requested
        devices.
      user: The user of the job of a script; by default you.
      priority: Weight of the job of a script relative to other jobs of its user.
      submission: With --at: name of this submission; a repeated submission of this name
        adds no jobs.
    """

    file: pathlib.Path = argument(metavar="JOBS.toml|SCRIPT.py")
    words: list[str] | None = argument(None, metavar="ARGS...")
    name: str = ""
    devices: int = option(1, min=1)
    guaranteed: bool = False
    user: str = ""
    priority: float = 1.0
    submission: str = option("", "--id")


@command("jobs cancel", "remote.wish", "jobs cancel small late --state runs")
class CancelCommand(WishOptions):
    """Ends jobs for good; the files that they saved stay in their folders."""

    wish: ClassVar[str] = "cancel"


@command("jobs hold", "remote.wish", "jobs hold small --state runs")
class HoldCommand(WishOptions):
    """Saves and stops jobs; they wait until `autopar jobs release`."""

    wish: ClassVar[str] = "hold"


@command("jobs release", "remote.wish", "jobs release small --state runs")
class ReleaseCommand(WishOptions):
    """Lets jobs run again that `autopar jobs hold` stopped."""


@command(
    "jobs logs", "remote.logs", "jobs logs small --state runs --follow", prints=True
)
class LogsCommand(StateOptions):
    """Prints what a job printed.

    Attributes:
      name: The name of a job.
      lines: Number of lines to print, from the end of the output.
      follow: Also print new output until the job has ended.
    """

    name: str = argument(metavar="JOB")
    lines: int = option(100, "-n", "--lines", min=1)
    follow: bool = option(False, "-f", "--follow")


@command("jobs show", "remote.show", "jobs show small --state runs")
class JobCommand(StateOptions, JsonOptions):
    """Shows everything about a job: its devices, times, decisions and output.

    Attributes:
      name: The name of a job.
    """

    name: str = argument(metavar="JOB")
