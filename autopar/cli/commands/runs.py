"""The commands of saved plans, of this machine, of runs and of checkpoints."""

import pathlib
from typing import Any

from autopar.cli.options import (
    BackendName,
    DevicesOptions,
    JsonOptions,
    RecoveryName,
    SecretOptions,
    argument,
    command,
    option,
    planning,
    record,
)

# Where a run keeps its state, by default.
RUN_FOLDER = pathlib.Path("autopar-run")


@record
class CheckpointOptions(JsonOptions):
    """The checkpoint of a command.

    Attributes:
      directory: A checkpoint, or a directory of them.
      step: Which of a directory; default: the last.
    """

    directory: pathlib.Path = argument(metavar="DIR")
    step: int | None = option(None, min=0)


@command("diff", "comparing.diff", "diff plan.json other.json")
class DiffCommand(JsonOptions):
    """Shows how two plans differ: mesh, costs, layouts and codecs.

    The exit code is 1 if they differ in more than the time that planning took.

    Attributes:
      one: A plan.json.
      other: Another one.
    """

    one: pathlib.Path = argument(metavar="A")
    other: pathlib.Path = argument(metavar="B")


@command("ledger", "ledgering.ledger", "ledger ledger.jsonl")
class LedgerCommand(JsonOptions):
    """Shows the re-plans of an elastic run: their causes, options and costs.

    A run writes the file if autopar.elastic or autopar.train is given ledger=.

    Attributes:
      file: A ledger.jsonl.
    """

    file: pathlib.Path = argument(metavar="FILE")


@command("profile", "examining.profile", "profile --devices 8")
class ProfileCommand(DevicesOptions):
    """Measures the devices and their links, and saves the numbers for planning.

    Attributes:
      out: Where to save it; by default where planning looks for it.
      distributed: Join jax.distributed first; run it on every host at the same time.
    """

    out: pathlib.Path | None = None
    distributed: bool = False


@command("doctor", "examining.doctor", "doctor --json")
class DoctorCommand(DevicesOptions, JsonOptions):
    """Checks versions, devices, threads, names and caches of this machine.

    For each problem it says what to do. The exit code is 1 if something is wrong.
    """


@command("demo", "demonstration.demo", "demo --devices 8 --steps 20", prints=True)
class DemoCommand:
    """Plans a GPT for simulated devices, trains it, and checks the predictions.

    Attributes:
      devices: CPU devices to simulate.
      steps: Steps to train.
      limits: the planning options.
    """

    devices: int = option(8, min=1)
    steps: int = option(40, min=2)
    limits: Any = planning("seconds")


@command(
    "run",
    "running.run",
    "run --processes 4 train.py --rate 0.1",
    script=True,
    prints=True,
)
class RunCommand(SecretOptions):
    """Runs a training script in several processes, which may go and come.

    If a process dies, the others go on; `autopar workers` changes their number. If the
    supervisor, which is this command, was killed, the same command continues the run.
    When a node joins a Ray cluster, the run starts one more process on it. With
    --listen, a host that joins starts as many processes as it has slots, up to --max in
    all. On SIGUSR1 the run saves its state and ends with status 75; the same command
    continues it.

    Attributes:
      script: The script, which calls autopar.elastic, and its own arguments.
      processes: How many processes to start.
      least: Fewest processes to go on with.
      most: Most processes that may be asked for.
      devices: Simulate this many CPU devices in each process.
      restarts: How many processes that died are replaced, in all.
      folder: Where the run keeps its state, log, plans and programs.
      silence: Seconds without a word after which a process is killed.
      grace: Seconds that processes go on without a supervisor.
      collective: Seconds that a process waits for another one in a collective.
      recovery: What processes do as their world breaks: join the next one in place, or
        end and be started again (respawn); auto: in place on CPUs alone.
      keep_every: Under respawn, write the state to shared memory every so many steps.
      ahead: Prepare programs of likely next worlds in a process more.
      backend: local: on this machine; ray: as actors on a Ray cluster; or a launcher of
        another package.
      address: Of the Ray cluster; by default RAY_ADDRESS, or that of this machine.
      resource: What a process takes of its node of a Ray cluster, such as GPU=1; one
        CPU unless CPU= is given.
      listen: Run them on other hosts, whose `autopar worker` call here, or whose nodes
        are in the Ray cluster.
      standby: With --listen: wait until the hosts of a run whose supervisor is lost
        call here, and supervise the run.
      metrics: Serve metrics for Prometheus; at 127.0.0.1 where no host is named.
    """

    script: list[str] = argument(metavar="SCRIPT.py [ARGUMENT]...")
    processes: int = option(2, min=1)
    least: int = option(1, "--min", min=1)
    most: int = option(64, "--max", min=1)
    devices: int | None = option(None, min=1)
    restarts: int = option(0, min=0)
    folder: pathlib.Path = RUN_FOLDER
    silence: float = option(15.0, min=1)
    grace: float = option(60.0, min=0)
    collective: int = option(10, "--collective-timeout", min=1)
    recovery: RecoveryName = RecoveryName.AUTO
    keep_every: int = option(10, min=1)
    ahead: bool = True
    backend: str = option(BackendName.LOCAL, metavar="NAME")
    address: str = ""
    resource: list[str] | None = option(None, metavar="KIND=NUMBER")
    listen: str = option("", metavar="HOST:PORT")
    standby: bool = option(False, "--standby")
    metrics: str = option("", metavar="[HOST:]PORT")


@command(
    "worker",
    "running.worker",
    "worker --supervisor 10.0.0.1:7000 --secret run.secret",
    prints=True,
)
class WorkerCommand(SecretOptions):
    """Starts processes on this host for a run, or for the jobs of a scheduler.

    The run is one that `autopar run --listen` supervises. A scheduler is `autopar
    schedule --backend hosts`, which gives the slots of this host to its jobs.

    The script has to be on this host at the same path, relative to the current folder.
    On SIGTERM and Ctrl-C, the processes first leave the run, and then the command ends.

    Attributes:
      supervisor: Where `autopar run --listen` is, and then its standbys; or where
        `autopar schedule --listen` is.
      slots: How many processes this host takes.
      folder: Where they keep plans and programs.
      address: Of this host, as the others reach it; by default the one from which it
        reaches the supervisor.
      kind: Of this host's devices, such as h100, for a scheduler.
      grace: Seconds that a supervisor that is away has to come.
      leave_status: Exit status where this host leaves a run that is not done.
    """

    supervisor: str = option(metavar="HOST:PORT[,...]")
    slots: int = option(1, min=1)
    folder: pathlib.Path = pathlib.Path("autopar-worker")
    address: str = ""
    kind: str = "cpu"
    grace: float = option(60.0, min=0)
    leave_status: int = option(0, min=0, max=255)


@command("workers", "workers.workers", "workers --folder runs/gpt --processes 3")
class WorkersCommand(JsonOptions):
    """Shows the processes of a run, and adds or removes some.

    If the other workers wait for one, its number is printed, with what it is doing and
    for how long.

    Attributes:
      place: With --stacks: its number.
      folder: The --folder of `autopar run`.
      processes: How many processes there should be.
      remove: The number of a worker that should go.
      stop: End the run.
      stacks: Print the Python stacks of all workers, or of the WORKER behind it.
    """

    place: pathlib.Path | None = argument(None, metavar="[WORKER]")
    folder: pathlib.Path = RUN_FOLDER
    processes: int | None = option(None, min=1)
    remove: int | None = option(None, min=0)
    stop: bool = False
    stacks: bool = False


@command("secret", "workers.secret", "secret run.secret")
class SecretCommand:
    """Makes a secret for a run on several hosts: a key and a certificate.

    Copy the file to each host. Anyone who has it can join the run and read its state.

    Attributes:
      file: To write; it must be new.
    """

    file: pathlib.Path = argument(metavar="FILE")


@command("checkpoint show", "checkpointing.show", "checkpoint show checkpoints")
class CheckpointCommand(CheckpointOptions):
    """Lists the checkpoints of a directory, and the arrays of the last or a given one.

    Incomplete checkpoints are listed, too.
    """


@command("checkpoint verify", "checkpointing.verify", "checkpoint verify checkpoints")
class VerifyCommand(CheckpointOptions):
    """Reads every array of the checkpoints, and compares it with its checksum.

    The exit code is 1 if an array is damaged.
    """


@command(
    "checkpoint convert",
    "checkpointing.convert",
    "checkpoint convert checkpoints model.safetensors --to safetensors",
)
class ConvertCommand(JsonOptions):
    """Converts parameters to safetensors or DeepSpeed's atoms, or reads these.

    Attributes:
      directory: A checkpoint, a directory, or atoms.
      target: What is written.
      to: safetensors, atoms or checkpoint.
      step: Which of a directory; default: the last.
      like: From atoms: a checkpoint of the model.
      names: From atoms: JSON, name of a parameter -> its name there.
      position: From atoms: number of samples consumed.
    """

    directory: pathlib.Path = argument(metavar="DIR")
    target: pathlib.Path = argument()
    to: str = option(metavar="FORMAT")
    step: int | None = option(None, min=0)
    like: pathlib.Path | None = option(None, metavar="DIR")
    names: pathlib.Path | None = option(None, metavar="FILE")
    position: int | None = option(None, min=0)


@command(
    "launch slurm",
    "running.slurm",
    "launch slurm --nodes 2-8 --time 4:00:00 --submit train.py",
    script=True,
)
class SlurmCommand:
    """Writes a Slurm batch script of an elastic run, or submits it.

    Before its time limit the job saves its state and is requeued. It then continues, on
    as many nodes as are free.

    Attributes:
      script: The script, which calls autopar.elastic, and its own arguments.
      nodes: Fewest and most nodes, such as 2-8.
      slots: Workers of each node.
      time: Time limit, such as 4:00:00.
      grace: Seconds before the time limit at which the state is saved.
      folder: The --folder of `autopar run`; all nodes have to see it.
      sbatch: Of sbatch, such as --partition=gpu. Repeatable.
      run: Of autopar run, such as --devices=4. Repeatable.
      out: Write the batch script to a file, not to stdout.
      submit: Hand the script to sbatch.
    """

    script: list[str] = argument(metavar="SCRIPT.py [ARGUMENT]...")
    nodes: str = option(metavar="N|MIN-MAX")
    slots: int = option(1, min=1)
    time: str = option("", metavar="LIMIT")
    grace: int = option(120, "--grace-signal", min=1, max=65535)
    folder: pathlib.Path = RUN_FOLDER
    sbatch: list[str] | None = option(None, metavar="OPTION")
    run: list[str] | None = option(None, metavar="OPTION")
    out: pathlib.Path | None = None
    submit: bool = False


@command(
    "launch kubernetes",
    "running.kubernetes",
    "launch kubernetes --name gpt --image registry.example/gpt:1 --nodes 2-8 "
    "--out run.yaml train.py",
    script=True,
)
class KubernetesCommand:
    """Writes the Kubernetes YAML of an elastic run: a JobSet, or Jobs.

    Pods join the run as they get nodes, and leave it as they lose them.

    Attributes:
      script: The script in the image, which calls autopar.elastic, and its own
        arguments.
      name: Of the run, such as gpt-small.
      image: Of the pods; it has autopar and the script.
      nodes: Fewest and most pods with workers, such as 2-8.
      slots: Workers of each pod.
      resources: Of each pod, such as cpu=4,memory=16Gi,nvidia.com/gpu=8.
      secret: Made by `autopar secret`, to put into the YAML; by default the Secret
        NAME-secret of the cluster has it.
      claim: A volume claim, mounted at /checkpoints by all pods.
      queue: Kueue's local queue.
      topology: A label of nodes, such as topology.kubernetes.io/zone: pods are placed
        on nodes that have one value of it, if they can.
      namespace: Of all objects.
      plain: Two Jobs, for a cluster without JobSet.
      out: Write the YAML to a file, not to stdout.
    """

    script: list[str] = argument(metavar="SCRIPT.py [ARGUMENT]...")
    name: str
    image: str
    nodes: str = option(metavar="N|MIN-MAX")
    slots: int = option(1, min=1)
    resources: str = option("", metavar="NAME=QUANTITY,...")
    secret: pathlib.Path | None = option(None, metavar="FILE")
    claim: str = option("", "--checkpoint-claim", metavar="PVC")
    queue: str = option("", metavar="QUEUE")
    topology: str = option("", metavar="KEY")
    namespace: str = ""
    plain: bool = False
    out: pathlib.Path | None = None
