"""Commands about saved plans, this machine, runs and checkpoints."""

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

# The default folder of a run's state.
RUN_FOLDER = pathlib.Path("autopar-run")


@record
class CheckpointOptions(JsonOptions):
    """The checkpoint that a command reads.

    Attributes:
      directory: A checkpoint, or a directory of checkpoints.
      step: The step of the checkpoint in a directory; by default the last.
    """

    directory: pathlib.Path = argument(metavar="DIR")
    step: int | None = option(None, min=0)


@command("diff", "comparing.diff", "diff plan.json other.json")
class DiffCommand(JsonOptions):
    """Shows how two plans differ: mesh, costs, layouts and codecs.

    The exit code is 1 if they differ, the time of planning not counted.

    Attributes:
      one: The plan.json of one plan.
      other: The plan.json of the other plan.
    """

    one: pathlib.Path = argument(metavar="A")
    other: pathlib.Path = argument(metavar="B")


@command("ledger", "ledgering.ledger", "ledger ledger.jsonl")
class LedgerCommand(JsonOptions):
    """Shows the re-plans of an elastic run: their causes, options and costs.

    A run writes the file if autopar.elastic or autopar.train is given ledger=.

    Attributes:
      file: The ledger.jsonl of the run.
    """

    file: pathlib.Path = argument(metavar="FILE")


@command("profile", "examining.profile", "profile --devices 8")
class ProfileCommand(DevicesOptions):
    """Measures the devices and their links, and saves the numbers for planning.

    Attributes:
      out: Where to save the profile; by default where planning looks for it.
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
      devices: Number of CPU devices to simulate.
      steps: Number of training steps.
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
    """Runs a training script in several processes, whose number may change.

    If a process dies, the others continue; `autopar workers` changes their number. This
    command is the supervisor of the run. If it is killed, the same command continues
    the run. When a node joins a Ray cluster, the run starts one more process on it.
    With --listen, a host that joins starts as many processes as it has slots, up to
    --max in total. On SIGUSR1 the run saves its state and ends with status 75; the same
    command continues it.

    Attributes:
      script: The script, which calls autopar.elastic, and its own arguments.
      processes: Number of processes to start.
      least: Fewest processes with which the run continues.
      most: Most processes that may be requested.
      devices: Simulate this many CPU devices in each process.
      restarts: Number of dead processes that are replaced, in total.
      folder: The folder of the run's state, log, plans and programs.
      silence: Seconds without a message after which a process is killed.
      grace: Seconds for which processes continue without a supervisor.
      collective: Seconds for which a process waits for another process in a collective.
      recovery: What processes do when their world breaks: join the next world in place,
        or end and be started again (respawn); auto: in place only on CPUs.
      keep_every: With respawn, write the state to shared memory after every so many
        steps.
      ahead: Prepare programs of likely next worlds in an additional process.
      backend: Where processes run: on this machine (local), as actors on a Ray cluster
        (ray), or by a launcher of another package.
      address: The address of the Ray cluster; by default RAY_ADDRESS, or the cluster of
        this machine.
      resource: What a process takes of its Ray node, such as GPU=1; one CPU unless CPU=
        is given.
      wait: Seconds to wait for nodes of the Ray cluster with room for processes. The
        autoscaler is asked for them, and for nodes in place of lost ones.
      listen: Run processes on other hosts, whose `autopar worker` connects to this
        address, or whose nodes are in the Ray cluster.
      standby: With --listen: wait until the hosts of a run whose supervisor is lost
        connect here, and then supervise the run.
      anew: With --listen: the hosts of an earlier run in this folder are lost, so do
        not ask them whether another supervisor has taken over.
      metrics: Serve metrics for Prometheus at this address; at 127.0.0.1 if no host is
        named.
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
    wait: float = option(0.0, min=0, metavar="SECONDS")
    listen: str = option("", metavar="HOST:PORT")
    standby: bool = option(False, "--standby")
    anew: bool = option(False, "--anew")
    metrics: str = option("", metavar="[HOST:]PORT")


@command(
    "worker",
    "running.worker",
    "worker --supervisor 10.0.0.1:7000 --secret run.secret",
    prints=True,
)
class WorkerCommand(SecretOptions):
    """Starts processes on this host, for a run or for the jobs of a scheduler.

    The run is one that `autopar run --listen` supervises. A scheduler is `autopar
    schedule --backend hosts`, which gives the slots of this host to its jobs.

    The script has to be on this host at the same path, relative to the current folder.
    On SIGTERM and Ctrl-C, the processes first leave the run, and then the command ends.

    Attributes:
      supervisor: Address of `autopar run --listen`, followed by those of its standbys;
        or address of `autopar schedule --listen`, followed by those at which it may be
        started again.
      slots: Most processes on this host.
      folder: The folder in which processes store plans and programs.
      address: Address at which other hosts reach this host; by default the one from
        which it connects to the supervisor.
      kind: Kind of this host's devices, such as h100, for a scheduler.
      grace: Seconds to wait for a supervisor that does not answer.
      leave_status: Exit status if this host leaves a run that has not ended.
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
    """Shows the processes of a run; adds or removes processes.

    If other workers wait for one worker, its number is printed, with what it is doing
    and for how long.

    Attributes:
      place: With --stacks: number of a worker.
      folder: The --folder of `autopar run`.
      processes: The number of processes to change to.
      remove: Number of the worker to remove.
      stop: End the run.
      stacks: Print the Python stacks of all workers, or of the WORKER named after this
        option.
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

    Copy the file to each host. Anyone who has the file can join the run and read its
    state.

    Attributes:
      file: The file to write; it must not exist yet.
    """

    file: pathlib.Path = argument(metavar="FILE")


@command("checkpoint show", "checkpointing.show", "checkpoint show checkpoints")
class CheckpointCommand(CheckpointOptions):
    """Lists checkpoints of a directory, and the arrays of one (by default the last).

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
    """Converts a checkpoint to safetensors or DeepSpeed's atoms, or from atoms.

    Attributes:
      directory: A checkpoint, a directory of checkpoints, or atoms.
      target: The file or folder to write.
      to: The format to write: safetensors, atoms or checkpoint.
      step: The step of the checkpoint in a directory; by default the last.
      like: From atoms: a checkpoint of the same model.
      names: From atoms: a JSON file that maps names of parameters to their names in the
        atoms.
      position: From atoms: number of consumed samples.
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

    Before its time limit the job saves its state and is requeued. It then continues on
    as many nodes as are free.

    Attributes:
      script: The script, which calls autopar.elastic, and its own arguments.
      nodes: Fewest and most nodes, such as 2-8.
      slots: Number of workers on each node.
      time: Time limit, such as 4:00:00.
      grace: Seconds before the time limit at which the state is saved.
      folder: The --folder of `autopar run`, which all nodes must see.
      sbatch: An option of sbatch, such as --partition=gpu. Repeatable.
      run: An option of autopar run, such as --devices=4. Repeatable.
      out: Write the batch script to this file instead of stdout.
      submit: Submit the script by sbatch.
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

    Pods join the run when they get nodes, and leave it when they lose them.

    Attributes:
      script: The script in the image, which calls autopar.elastic, and its own
        arguments.
      name: Name of the run, such as gpt-small.
      image: Image of the pods, which contains autopar and the script.
      nodes: Fewest and most pods with workers, such as 2-8.
      slots: Number of workers in each pod.
      resources: Resources of each pod, such as cpu=4,memory=16Gi,nvidia.com/gpu=8.
      secret: A file made by `autopar secret`, which the YAML will contain; by default
        the cluster's Secret NAME-secret is used.
      claim: A volume claim that all pods mount at /checkpoints.
      queue: Name of Kueue's local queue.
      topology: A label of nodes, such as topology.kubernetes.io/zone: if possible, all
        pods run on nodes with the same value of this label.
      namespace: Namespace of all objects.
      plain: Write two Jobs, for a cluster without JobSet.
      out: Write the YAML to this file instead of stdout.
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
