"""Commands that start elastic runs on clusters that other programs manage."""

# This module does not import `annotations` from `__future__`: typer reads annotations
# of wrapped functions, and cannot read strings there.

import pathlib
from typing import Annotated

import typer

from autopar.cli.output import Result


def slurm(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py [ARGUMENT]...",
            help="The script, which calls autopar.elastic, and its own arguments.",
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(metavar="N|MIN-MAX", help="Fewest and most nodes, such as 2-8."),
    ],
    slots: Annotated[int, typer.Option(min=1, help="Workers of each node.")] = 1,
    time: Annotated[
        str, typer.Option(metavar="LIMIT", help="Time limit, such as 4:00:00.")
    ] = "",
    grace: Annotated[
        int,
        typer.Option(
            "--grace-signal",
            min=1,
            max=65535,
            help="Seconds before the time limit at which the state is saved.",
        ),
    ] = 120,
    folder: Annotated[
        pathlib.Path,
        typer.Option(help="The --folder of `autopar run`; all nodes have to see it."),
    ] = pathlib.Path("autopar-run"),
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Of sbatch, such as --partition=gpu. Repeatable."
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Of autopar run, such as --devices=4. Repeatable."
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write the batch script to a file, not to stdout."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the script to sbatch.")
    ] = False,
) -> Result:
    """Writes a Slurm batch script of an elastic run, or submits it.

    Before its time limit the job saves its state and is requeued. It then continues, on
    as many nodes as are free.
    """
    # This module imports NumPy, which `--help` must not import.
    from autopar.launching import slurm as launcher

    if not pathlib.Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]}.")
    job = launcher.SlurmJob(
        script=tuple(script),
        nodes=launcher.read_nodes(nodes),
        slots=slots,
        time=time,
        signal_s=grace,
        place=pathlib.Path.cwd(),
        folder=folder,
        sbatch=tuple(sbatch or ()),
        run=tuple(run or ()),
    )
    if out is not None:
        launcher.write_script(job, out)
    if submit:
        return Result(launcher.submit(job))
    return Result(launcher.job_script(job) if out is None else f"{out}: a batch script")


def kubernetes(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py [ARGUMENT]...",
            help="The script in the image, which calls autopar.elastic, and its own "
            "arguments.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the run, such as gpt-small.")],
    image: Annotated[
        str, typer.Option(help="Of the pods; it has autopar and the script.")
    ],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN-MAX", help="Fewest and most pods with workers, such as 2-8."
        ),
    ],
    slots: Annotated[int, typer.Option(min=1, help="Workers of each pod.")] = 1,
    resources: Annotated[
        str,
        typer.Option(
            metavar="NAME=QUANTITY,...",
            help="Of each pod, such as cpu=4,memory=16Gi,nvidia.com/gpu=8.",
        ),
    ] = "",
    secret: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Made by `autopar secret`, to put into the YAML; by default the "
            "Secret NAME-secret of the cluster has it.",
        ),
    ] = None,
    claim: Annotated[
        str,
        typer.Option(
            "--checkpoint-claim",
            metavar="PVC",
            help="A volume claim, mounted at /checkpoints by all pods.",
        ),
    ] = "",
    queue: Annotated[
        str, typer.Option(metavar="QUEUE", help="Kueue's local queue.")
    ] = "",
    topology: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="A label of nodes, such as topology.kubernetes.io/zone: pods are "
            "placed on nodes that have one value of it, if they can.",
        ),
    ] = "",
    namespace: Annotated[str, typer.Option(help="Of all objects.")] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Two Jobs, for a cluster without JobSet.")
    ] = False,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write the YAML to a file, not to stdout."),
    ] = None,
) -> Result:
    """Writes the Kubernetes YAML of an elastic run: a JobSet, or Jobs.

    Pods join the run as they get nodes, and leave it as they lose them.
    """
    # This module imports NumPy, which `--help` must not import.
    from autopar.elastic.processes.network import read_secret
    from autopar.launching import kubernetes as launcher  # late, like the others
    from autopar.launching.slurm import read_nodes  # late, like the others
    from autopar.whole_files import export_whole, write_whole  # late, like the others

    run = launcher.KubernetesRun(
        name=name,
        image=image,
        script=tuple(script),
        nodes=read_nodes(nodes),
        slots=slots,
        resources=launcher.read_resources(resources),
        namespace=namespace,
        queue=queue,
        topology=topology,
        checkpoint_claim=claim,
        secret="" if secret is None else read_secret(secret),
    )
    text = launcher.to_yaml(run, plain=plain)
    if out is None:
        return Result(text.rstrip("\n"))
    # Other users must not be able to read a file with the secret.
    write = export_whole if secret is None else write_whole
    write(out, text.encode())
    return Result(f"{out}: start the run by `kubectl create -f {out}`")
