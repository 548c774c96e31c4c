"""Commands for training runs, their workers, ledgers and checkpoints."""

# This module does not import `annotations` from `__future__`: typer reads annotations
# of wrapped functions, and cannot read strings there.

import json
import pathlib
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.options import BackendName, RecoveryName
from autopar.cli.output import Result
from autopar.plugins import LAUNCHERS, load_plugin, plugin_names

_Secret = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Made by `autopar secret`; by default the text of AUTOPAR_SECRET.",
    ),
]


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
    recovery: Annotated[
        RecoveryName,
        typer.Option(
            help="What processes do as their world breaks: join the next one in place, "
            "or end and be started again (respawn); auto: in place on CPUs alone."
        ),
    ] = RecoveryName.AUTO,
    keep_every: Annotated[
        int,
        typer.Option(
            "--keep-every",
            min=1,
            help="Under respawn, write the state to shared memory every so many steps.",
        ),
    ] = 10,
    ahead: Annotated[
        bool,
        typer.Option(help="Prepare programs of likely next worlds in a process more."),
    ] = True,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="local: on this machine; ray: as actors on a Ray cluster; or a "
            "launcher of another package.",
        ),
    ] = BackendName.LOCAL,
    address: Annotated[
        str,
        typer.Option(
            help="Of the Ray cluster; by default RAY_ADDRESS, or that of this machine."
        ),
    ] = "",
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NUMBER",
            help="What a process takes of its node of a Ray cluster, such as GPU=1; "
            "one CPU unless CPU= is given.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Run them on other hosts, whose `autopar worker` call here, or whose "
            "nodes are in the Ray cluster.",
        ),
    ] = "",
    secret: _Secret = None,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve metrics for Prometheus; at 127.0.0.1 where no host is named.",
        ),
    ] = "",
) -> Result:
    """Runs a training script in several processes, which may go and come.

    If a process dies, the others go on; `autopar workers` changes their number. If the
    supervisor, which is this command, was killed, the same command continues the run.
    When a node joins a Ray cluster, the run starts one more process on it. With
    --listen, a host that joins starts as many processes as it has slots, up to --max in
    all. On SIGUSR1 the run saves its state and ends with status 75; the same command
    continues it.
    """
    # These modules import NumPy, which `--help` must not import.
    from autopar.backends.ray import RayLauncher, read_resources  # late
    from autopar.elastic.processes import hosts, launching, network, runner  # late
    from autopar.elastic.processes import metrics as serving  # late, like the others
    from autopar.elastic.processes.members import MemberLimits  # late, like the others
    from autopar.elastic.processes.recovery import Recovery  # late, like the others

    if not least <= processes <= most:
        raise typer.BadParameter(
            f"--processes {processes} is not within --min {least} and --max {most}."
        )
    if not pathlib.Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]}.")
    ray = backend == BackendName.RAY
    if address and not ray:
        raise typer.BadParameter("--address is that of a cluster: add --backend ray.")
    make = load_plugin(LAUNCHERS, backend)
    if make is None and backend not in list(BackendName):
        names = ", ".join([*BackendName, *plugin_names(LAUNCHERS)])
        raise typer.BadParameter(f"--backend {backend}: there are {names}.")
    if resource and not ray:
        raise typer.BadParameter("--resource is of a Ray node: add --backend ray.")
    try:
        taken = read_resources(resource or ())
    except ValueError as error:
        raise typer.BadParameter(f"--resource: {error}") from error
    if ray and recovery is RecoveryName.RESPAWN:
        raise typer.BadParameter(
            "--recovery respawn needs shared memory of the host: leave --backend ray."
        )
    if secret is not None and not listen:
        raise typer.BadParameter("--secret is for other hosts: add --listen HOST:PORT.")
    reached, port = network.Network(), 0
    if listen:
        try:
            host, port = network.split_address(listen)
        except ValueError as error:
            raise typer.BadParameter(f"--listen: {error}.") from error
        reached = network.Network(host, network.read_secret(secret))
        if ray and host in ("0.0.0.0", "::"):
            raise typer.BadParameter(
                "--listen with --backend ray: name the address that nodes reach."
            )
    served: serving.RunMetrics | None = None
    if metrics:
        try:
            at = serving.read_address(metrics)
        except ValueError as error:
            raise typer.BadParameter(
                f"--metrics: {error}. Give a port, or HOST:PORT of this host."
            ) from error
        served = serving.RunMetrics(*at)
    job = runner.RunJob(
        command=launching.python_command(script),
        limits=MemberLimits(
            processes=processes,
            least=least,
            most=most,
            restarts=restarts,
            silent_s=silence,
            # Workers that lost their supervisor go on training for the grace period.
            fence_s=grace + silence if listen else 0.0,
            prepares=ahead,
        ),
        folder=folder,
        devices=devices,
        grace_s=grace,
        collective_s=collective,
        network=reached,
        port=port,
        recovery=Recovery(recovery.value, keep_every),
    )
    launcher: launching.Launcher | None = None
    if ray:
        launcher = RayLauncher(
            script, processes, address, network=reached, resources=taken
        )
    elif make is not None:
        launcher = make(script, processes)
    elif listen:
        launcher = hosts.HostLauncher(script, silence)
    made = runner.Runner(job, launcher, served)
    code = made.run()
    return Result(made.summary(), code, failed=code != 0)


def worker(
    supervisor: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where `autopar run --listen` is.")
    ],
    secret: _Secret = None,
    slots: Annotated[
        int, typer.Option(min=1, help="How many processes this host takes.")
    ] = 1,
    folder: Annotated[
        pathlib.Path, typer.Option(help="Where they keep plans and programs.")
    ] = pathlib.Path("autopar-worker"),
    address: Annotated[
        str,
        typer.Option(
            help="Of this host, as the others reach it; by default the one from which "
            "it reaches the supervisor."
        ),
    ] = "",
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds that a supervisor that is away has to come."),
    ] = 60.0,
    leave_status: Annotated[
        int,
        typer.Option(
            min=0,
            max=255,
            help="Exit status where this host leaves a run that is not done.",
        ),
    ] = 0,
) -> Result:
    """Starts processes on this host for a run that `autopar run --listen` supervises.

    The script has to be on this host at the same path, relative to the current folder.
    On SIGTERM and Ctrl-C, the processes first leave the run, and then the command ends.
    """
    # These modules import NumPy, which `--help` must not import.
    from autopar.elastic.processes import hosts, network

    options_ = hosts.AgentOptions(
        supervisor=supervisor,
        secret=network.read_secret(secret),
        slots=slots,
        folder=folder,
        address=address,
        grace_s=grace,
        leave_status=leave_status,
    )
    code = hosts.Agent(options_).run()
    failed = code not in (0, leave_status)
    return Result("autopar worker: this host has left the run", code, failed=failed)


def secret(
    file: Annotated[
        pathlib.Path, typer.Argument(metavar="FILE", help="To write; it must be new.")
    ],
) -> Result:
    """Makes a secret for a run on several hosts: a key and a certificate.

    Copy the file to each host. Anyone who has it can join the run and read its state.
    """
    # The import of this module takes long, so help must not import it.
    from autopar.elastic.processes import certificates

    certificates.create_secret(file)
    return Result(
        f"{file}: a new secret; copy it to each host, and keep it from others"
    )


_FOLDER = pathlib.Path("autopar-run")
_STOPS = "the run is asked to end: its workers end after the step that they are in"


def workers(
    place: Annotated[
        pathlib.Path | None,
        typer.Argument(metavar="[WORKER]", help="With --stacks: its number."),
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
    stacks: Annotated[
        bool,
        typer.Option(
            "--stacks",
            help="Print the Python stacks of all workers, or of the WORKER behind it.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> Result:
    """Shows the processes of a run, and adds or removes some.

    If the other workers wait for one, its number is printed, with what it is doing and
    for how long.
    """
    # These modules import NumPy, which `--help` must not import.
    from autopar.elastic.processes.records import command, ending_text, read_ending
    from autopar.elastic.processes.stacks import stack_lines  # late, like the others
    from autopar.errors import PlanError  # late, like the others
    from autopar.units import number_of  # late, like the others

    wanted: int | None = None
    if stacks and place is not None and str(place).isdigit():
        wanted, place = int(str(place)), None
    if place is not None and folder != _FOLDER:
        raise typer.BadParameter(f"give the folder once: --folder {folder}.")
    folder = place or folder  # earlier releases took it as an argument
    asked = [processes is not None, remove is not None, stop, stacks]
    if sum(asked) > 1:
        raise typer.BadParameter(
            "give one of --processes, --remove, --stop and --stacks."
        )
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
    status = answer["status"]
    if stacks:
        missing = answer["missing"]
        if wanted is not None and missing:
            raise PlanError(missing[str(wanted)])
        keys = ("stacks", "missing")
        found = json.dumps({k: answer[k] for k in keys}, indent=1)
        text = found if as_json else "\n".join(stack_lines(answer))
        return Result(text, 1 if missing else 0)
    if as_json:
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


def ledger(
    file: Annotated[
        pathlib.Path, typer.Argument(metavar="FILE", help="A ledger.jsonl.")
    ],
    as_json: options.Json = False,
) -> Result:
    """Shows the re-plans of an elastic run: their causes, options and costs.

    A run writes the file if autopar.elastic or autopar.train is given ledger=.
    """
    # This module imports NumPy, which `--help` must not import.
    from autopar.cli import ledgering

    return ledgering.ledger(file, as_json)


@options.planning("seconds")
def demo(
    devices: Annotated[int, typer.Option(min=1, help="CPU devices to simulate.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps to train.")] = 40,
    *,
    asked: options.Asked,
) -> None:
    """Plans a GPT for simulated devices, trains it, and checks the predictions."""
    # These modules import JAX, which `--help` must not import.
    from autopar.cli import common, demonstration

    common.simulate_devices(devices)
    with common.progress() as say:
        demonstration.run(
            devices=devices, steps=steps, options=asked, show=typer.echo, say=say
        )


_Directory = Annotated[
    pathlib.Path,
    typer.Argument(metavar="DIR", help="A checkpoint, or a directory of them."),
]
_Step = Annotated[
    int | None, typer.Option(min=0, help="Which of a directory; default: the last.")
]


def show(
    directory: _Directory, step: _Step = None, as_json: options.Json = False
) -> Result:
    """Lists the checkpoints of a directory, and the arrays of the last or a given one.

    Incomplete checkpoints are listed, too.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import checkpointing

    return checkpointing.show(directory, step, as_json)


def verify(
    directory: _Directory, step: _Step = None, as_json: options.Json = False
) -> Result:
    """Reads every array of the checkpoints, and compares it with its checksum.

    The exit code is 1 if an array is damaged.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import checkpointing

    return checkpointing.verify(directory, step, as_json)


def convert(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(metavar="DIR", help="A checkpoint, a directory, or atoms."),
    ],
    target: Annotated[pathlib.Path, typer.Argument(help="What is written.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="safetensors, atoms or checkpoint.")
    ],
    step: _Step = None,
    like: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="DIR", help="From atoms: a checkpoint of the model."),
    ] = None,
    names: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="From atoms: JSON, name of a parameter -> its name there.",
        ),
    ] = None,
    position: Annotated[
        int | None, typer.Option(min=0, help="From atoms: number of samples consumed.")
    ] = None,
    as_json: options.Json = False,
) -> Result:
    """Converts parameters to safetensors or DeepSpeed's atoms, or reads these."""
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import checkpointing

    return checkpointing.convert(
        directory,
        target,
        to,
        step=step,
        like=like,
        names=names,
        position=position,
        as_json=as_json,
    )
