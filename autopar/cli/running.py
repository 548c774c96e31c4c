"""The work of ``autopar run``, ``autopar worker`` and ``autopar launch``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from autopar.backends.ray import RayLauncher, read_resources
from autopar.cli.commands.runs import (
    KubernetesCommand,
    RunCommand,
    SlurmCommand,
    WorkerCommand,
)
from autopar.cli.options import BackendName, RecoveryName
from autopar.cli.output import Result
from autopar.elastic.processes import agents, hosts, launching, network, runner
from autopar.elastic.processes import metrics as serving
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.recovery import Recovery
from autopar.launching import kubernetes as kubernetes_launcher
from autopar.launching import slurm as slurm_launcher
from autopar.plugins import LAUNCHERS, load_plugin, plugin_names
from autopar.whole_files import export_whole, write_whole

_T = TypeVar("_T")


def _read(flag: str, read: Callable[[Any], _T], given: Any, end: str = "") -> _T:
    """Reads the value of an option; a wrong value is a mistake in the option."""
    try:
        return read(given)
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: {error}{end}") from error


def _check_script(script: Sequence[str]) -> None:
    if not pathlib.Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]}.")


def run(asked: RunCommand) -> Result:
    """Supervises the processes of a run until the run ends."""
    least, most, processes = asked.least, asked.most, asked.processes
    if not least <= processes <= most:
        raise typer.BadParameter(
            f"--processes {processes} is not within --min {least} and --max {most}."
        )
    _check_script(asked.script)
    ray = asked.backend == BackendName.RAY
    if asked.address and not ray:
        raise typer.BadParameter("--address is that of a cluster: add --backend ray.")
    make = load_plugin(LAUNCHERS, asked.backend)
    if make is None and asked.backend not in list(BackendName):
        names = ", ".join([*BackendName, *plugin_names(LAUNCHERS)])
        raise typer.BadParameter(f"--backend {asked.backend}: there are {names}.")
    if asked.resource and not ray:
        raise typer.BadParameter("--resource is of a Ray node: add --backend ray.")
    if asked.wait and not ray:
        raise typer.BadParameter("--wait is for nodes of Ray: add --backend ray.")
    taken = _read("--resource", read_resources, asked.resource or ())
    if ray and asked.recovery is RecoveryName.RESPAWN:
        raise typer.BadParameter(
            "--recovery respawn needs shared memory of the host: leave --backend ray."
        )
    if asked.secret is not None and not asked.listen:
        raise typer.BadParameter("--secret is for other hosts: add --listen HOST:PORT.")
    listens = asked.listen and not (asked.listen.endswith(":0") or ray or make)
    if asked.standby and not listens:
        raise typer.BadParameter(
            "--standby is for runs over hosts: add --listen HOST:PORT, with the "
            "address that the agents have."
        )
    if asked.anew and (asked.standby or not asked.listen):
        raise typer.BadParameter(
            "--anew is for a run over hosts without its supervisor: add --listen, and "
            "leave --standby."
        )
    reached, port = network.Network(), 0
    if asked.listen:
        host, port = _read("--listen", network.split_address, asked.listen, ".")
        reached = network.Network(host, network.read_secret(asked.secret))
        if ray and host in ("0.0.0.0", "::"):
            raise typer.BadParameter(
                "--listen with --backend ray: name the address that nodes reach."
            )
    served: serving.RunMetrics | None = None
    if asked.metrics:
        end = ". Give a port, or HOST:PORT of this host."
        at = _read("--metrics", serving.read_address, asked.metrics, end)
        served = serving.RunMetrics(*at)
    job = runner.RunJob(
        command=launching.python_command(asked.script),
        limits=MemberLimits(
            processes=processes,
            least=least,
            most=most,
            restarts=asked.restarts,
            silent_s=asked.silence,
            # Workers that lost their supervisor continue to train for the grace
            # period.
            fence_s=asked.grace + asked.silence if asked.listen else 0.0,
            prepares=asked.ahead,
        ),
        folder=asked.folder,
        devices=asked.devices,
        grace_s=asked.grace,
        collective_s=asked.collective,
        network=reached,
        port=port,
        recovery=Recovery(asked.recovery.value, asked.keep_every),
        standby=asked.standby,
        anew=asked.anew,
    )
    launcher: launching.Launcher | None = None
    if ray:
        launcher = RayLauncher(
            asked.script,
            processes,
            asked.address,
            network=reached,
            resources=taken,
            wait_s=asked.wait,
        )
    elif make is not None:
        launcher = make(asked.script, processes)
    elif asked.listen:
        launcher = hosts.HostLauncher(asked.script, asked.silence)
    try:
        made = runner.Runner(job, launcher, served)
    except runner.RunEnded as ended:
        return Result(f"autopar run: {ended}", ended.code, failed=ended.code != 0)
    code = made.run()
    return Result(made.summary(), code, failed=code != 0)


def worker(asked: WorkerCommand) -> Result:
    """Starts and ends processes of a run on this host until it leaves the run."""
    options = agents.AgentOptions(
        supervisor=asked.supervisor,
        secret=network.read_secret(asked.secret),
        slots=asked.slots,
        folder=asked.folder,
        address=asked.address,
        grace_s=asked.grace,
        leave_status=asked.leave_status,
        kind=asked.kind,
    )
    code = agents.Agent(options).run()
    failed = code not in (0, asked.leave_status)
    return Result("autopar worker: this host has left the run", code, failed=failed)


def slurm(asked: SlurmCommand) -> Result:
    """Writes a Slurm batch script of an elastic run, or submits it."""
    _check_script(asked.script)
    job = slurm_launcher.SlurmJob(
        script=tuple(asked.script),
        nodes=slurm_launcher.read_nodes(asked.nodes),
        slots=asked.slots,
        time=asked.time,
        signal_s=asked.grace,
        place=pathlib.Path.cwd(),
        folder=asked.folder,
        sbatch=tuple(asked.sbatch or ()),
        run=tuple(asked.run or ()),
    )
    out = asked.out
    if out is not None:
        slurm_launcher.write_script(job, out)
    if asked.submit:
        return Result(slurm_launcher.submit(job))
    if out is not None:
        return Result(f"{out}: submit the run by `sbatch {out}`")
    return Result(slurm_launcher.job_script(job))


def kubernetes(asked: KubernetesCommand) -> Result:
    """Writes the Kubernetes YAML of an elastic run."""
    made = kubernetes_launcher.KubernetesRun(
        name=asked.name,
        image=asked.image,
        script=tuple(asked.script),
        nodes=slurm_launcher.read_nodes(asked.nodes),
        slots=asked.slots,
        resources=kubernetes_launcher.read_resources(asked.resources),
        namespace=asked.namespace,
        queue=asked.queue,
        topology=asked.topology,
        checkpoint_claim=asked.claim,
        secret="" if asked.secret is None else network.read_secret(asked.secret),
    )
    text, out = kubernetes_launcher.to_yaml(made, plain=asked.plain), asked.out
    if out is None:
        return Result(text.rstrip("\n"))
    # Other users must not be able to read a file with the secret.
    write = export_whole if asked.secret is None else write_whole
    write(out, text.encode())
    return Result(f"{out}: start the run by `kubectl create -f {out}`")
