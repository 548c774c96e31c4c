"""The commands of clusters that jobs share: simulate, schedule and jobs."""

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
    """What users of a cluster may have of it.

    Attributes:
      quota: The most devices that a user's jobs hold together.
      share: A user's weight under fair and goodput; else 1.
    """

    quota: list[str] | None = option(None, metavar="USER=N")
    share: list[str] | None = option(None, metavar="USER=WEIGHT")


@record
class RemoteOptions(SecretOptions):
    """Where the scheduler of a command is.

    Attributes:
      at: At a scheduler on another machine: where its --listen is.
    """

    at: str = option("", metavar="HOST:PORT")


@record
class StateOptions(RemoteOptions):
    """The state of the scheduler of a command.

    Attributes:
      state: The scheduler's --state.
    """

    state: pathlib.Path = option(_STATE, metavar="DIR")


@record
class WishOptions(StateOptions):
    """What is wished of jobs.

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
    output of sacct -P. The exit code is 3 if some jobs could not run.

    Attributes:
      trace: A CSV file, the output of sacct -P, or Philly's JSON.
      cluster: Nodes x devices, such as 16x4, or 6x4:t4+2x8:a100 for two kinds.
      policy: fifo, fair, tiresias, optimus, gavel, pollux, sia, rubick, goodput.
      tables: The folder of measured tables, or one for each kind of devices; ../traces
        beside the trace's folder by default.
      interval: Time between two decisions.
      react: Decides so soon when a job comes or ends, or a node; 0: in every interval
        alone, as published simulators do.
      restart: What a move takes; as in the published simulator by default.
      interference: Of its speed, what a job on several nodes loses beside another.
      away: A CSV file of nodes that leave and come back.
      page: Write a page with the timeline of devices.
      explain: Print every decision.
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
    """Runs jobs on a cluster that they share, until all have ended.

    Each job is a script that calls autopar.elastic. The policy decides when a job
    starts, gets more or fewer devices, or is preempted. If the scheduler is killed, the
    jobs go on, and `autopar jobs cancel` can end them. A scheduler that is started
    again with the same --state finds its jobs.

    Attributes:
      table: A table [[job]] for each job; without it, what was submitted.
      policy: fifo, fair, tiresias, gavel, pollux, sia or goodput.
      state: Where jobs and decisions are kept.
      backend: Slots of this machine, nodes of Ray, or hosts whose `autopar worker` call
        --listen.
      address: Of the Ray cluster; by default RAY_ADDRESS, or that of this machine.
      nodes: With local: so many nodes, and their slots. With hosts: the cluster that
        curves are planned for.
      interval: Between two decisions, at the most.
      react: Decides so soon when a job comes or ends, or a node; 0: in every interval
        alone.
      start: From the start of a job to its first step, for the policy.
      change: Pause of a job that gets other devices, for the policy.
      stay: Wait for `autopar jobs submit` when all ended.
      listen: Take `autopar jobs ... --at` of other machines here, and hosts.
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
    stay: bool = False
    listen: str = option("", metavar="HOST:PORT")


@command("jobs list", "remote.jobs", "jobs runs")
class ListCommand(RemoteOptions, JsonOptions):
    """Lists the jobs of a scheduler, and says whether it runs; `autopar jobs DIR`.

    Attributes:
      folder: The scheduler's --state.
      decisions: Print every decision, and why.
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
      words: Of the script, after --.
      name: Of a script's job; the script's by default.
      devices: That a script's job asks for.
      guaranteed: A script's job is promised the speed it asks for.
      user: Whose a script's job is; by default yours.
      priority: Its weight beside other jobs of its user.
      submission: With --at: of the submission; the same is taken once.
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
    """Saves and stops jobs; they wait until they are released."""

    wish: ClassVar[str] = "hold"


@command("jobs release", "remote.wish", "jobs release small --state runs")
class ReleaseCommand(WishOptions):
    """Lets jobs that were held run again."""


@command(
    "jobs logs", "remote.logs", "jobs logs small --state runs --follow", prints=True
)
class LogsCommand(StateOptions):
    """Prints what a job printed.

    Attributes:
      name: The name of a job.
      lines: So many of the last lines.
      follow: Print what comes, to the job's end.
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
