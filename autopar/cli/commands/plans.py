"""Commands that make, read and compare plans."""

# This module does not import `annotations` from `__future__`: typer reads annotations
# of wrapped functions, and cannot read strings there.

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from autopar.cli import options
from autopar.cli.output import Result


@options.planning()
def plan(
    target: options.Target,
    words: options.Words = None,
    cluster: options.ClusterSpec = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Where to save the plan as JSON.")
    ] = None,
    as_json: options.Json = False,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where to write a page about the plan.")
    ] = None,
    memory: options.Memory = None,
    explain_search: Annotated[
        bool,
        typer.Option(
            "--explain-search", help="Also print what was proposed, and how fast it is."
        ),
    ] = False,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Where to write the predicted schedule of stages, for Perfetto."
        ),
    ] = None,
    *,
    asked: options.Asked,
) -> Result:
    """Finds the fastest plan of a train step on a cluster, and prints it.

    The target's function returns (train_step, state, batch); arrays may be
    jax.ShapeDtypeStruct, so nothing of the model's size is allocated.
    """
    # These modules import JAX, which `--help` must not import.
    from autopar.cli import common, planning

    for path in (out, html, trace):
        common.check_folder(path)
    return planning.plan(
        target,
        words or [],
        cluster=common.read_cluster(cluster, memory),
        limits=asked,
        out=out,
        html=html,
        trace=trace,
        explain_search=explain_search,
        as_json=as_json,
    )


@options.planning(without=("seconds",))
def explain(
    source: options.PlanOrTarget,
    words: options.PlanWords = None,
    tensor: Annotated[
        str | None,
        typer.Option(help="Inputs to explain, such as 'state/params/*/kernel'."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--alternatives", min=0, help="Other layouts to try of each.")
    ] = 6,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit of the solver for each layout.")
    ] = 3.0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="{operator,layer}", help="Attribute the whole step to these."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Most rows of a table; others are added up.")
    ] = 20,
    cluster: options.ClusterSpec = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Shows where a step's time and memory go, or why an input has its layout.

    With --by it prints the work and communication of each operator or layer; the rows
    add up to the step. With --tensor it prints the layout of each matching input, the
    communication that this layout causes, and the time of the best plan with each of
    some other layouts. It also prints the codec of the input's gradient, and the costs
    of other codecs.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import explaining

    return explaining.explain(
        source,
        words,
        tensor=tensor,
        by=by,
        top=top,
        limit=limit,
        seconds=seconds,
        cluster=cluster,
        limits=asked,
        as_json=as_json,
    )


@options.planning()
def compare(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A target, or a plan.json.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN]... [KEY=VALUE]...",
            help="Other saved plans of the step; arguments of the target's function.",
        ),
    ] = None,
    cluster: options.ClusterSpec = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the plans on this process's devices.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Turns of three timed steps for each plan.")
    ] = 5,
    devices: options.Devices = None,
    memory: options.Memory = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Compares the plan with the usual ones: data parallel, ZeRO, tensor parallel ...

    With --stages, the plan is also compared with pipelines of equal stages, with data
    or tensor parallelism in each stage. These have the given --schedule and
    --microbatches, too.

    Saved plans are compared without planning again, on their cluster.

    With --compression only the plan has codecs, the usual plans have none.

    With --measure all plans that fit are run and timed on this process's devices. For a
    cluster of CPU devices, the devices are simulated.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import comparing

    return comparing.compare(
        target,
        words or [],
        cluster=comparing.cluster_said(cluster, memory),
        limits=asked,
        repeats=repeats if measure else 0,
        as_json=as_json,
    )


def diff(
    one: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A plan.json.")],
    other: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: options.Json = False,
) -> Result:
    """Shows how two plans differ: mesh, costs, layouts and codecs.

    The exit code is 1 if they differ in more than the time that planning took.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import comparing

    return comparing.diff(one, other, as_json)


@options.planning()
def sweep(
    target: options.Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=RANGE]...",
            help="Arguments of the target's function: 8,16 or 8..64, which doubles, or "
            "8..32+8, in steps.",
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="SPEC",
            help="Such as 8x8:h100, or 1..8x8:h100 for several. Repeatable.",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Find the largest value that fits, of batch for example.",
        ),
    ] = None,
    efficiency: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="The least of devices that are worth it."),
    ] = 0.7,
    memory: options.Memory = None,
    cache: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder that keeps plans for the next sweep."),
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Iterator[Result]:
    """Plans a train step for ranges of its options, on several clusters.

    The table has a row for each combination. Below it stands the largest number of
    devices whose efficiency is high enough. The efficiency is the speed-up over one
    device, divided by the number of devices. Ctrl-C ends the sweep and prints the rows
    that are done.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import sweeping

    return sweeping.sweep(
        target,
        words or [],
        clusters=cluster or [],
        memory=memory,
        limits=asked,
        share=efficiency,
        sized=largest,
        cache=cache,
        as_json=as_json,
    )


@options.planning()
def audit(
    source: options.PlanOrTarget,
    words: options.PlanWords = None,
    cluster: options.ClusterSpec = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile for simulated devices too; slower."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Compile with the compiler of h100, a100, b200, v5e or v5p.",
        ),
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed. With --compile the step is also compiled for simulated
    CPU devices, and the memory of the compiled step is read. With --target it is
    compiled with the accelerator's own compiler instead, which an extra installs.
    """
    # This module imports JAX, which `--help` must not import.
    from autopar.cli import planning

    return planning.audit(
        source,
        words,
        cluster=cluster,
        limits=asked,
        compiled=compiled and target is None,
        target=target,
        as_json=as_json,
    )


@options.planning(without=("layouts", "microbatches", "stages", "schedule"))
def goodput(
    target: options.Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [CLUSTER]...",
            help="Arguments of the target's function, and more clusters.",
        ),
    ] = None,
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--clusters",
            metavar="SPEC...",
            help="Such as 1:h100 2:h100 8x8:h100, or 1..8x8:h100. Repeatable.",
        ),
    ] = None,
    noise_scale: Annotated[
        float | None,
        typer.Option(min=0.0, help="Noise scale of the gradients, in rows."),
    ] = None,
    base_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the base batch; the target's otherwise."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of the largest batch.")
    ] = None,
    memory: options.Memory = None,
    anew: Annotated[
        bool,
        typer.Option(
            "--anew", help="Plan each cluster from nothing, not from its neighbour."
        ),
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Plan in so many processes.")
    ] = None,
    cache: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder that keeps plans for the next time."),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Where to save the curve as JSON.")
    ] = None,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where to write a page with a picture.")
    ] = None,
    as_json: options.Json = False,
    *,
    asked: options.Asked,
) -> Result:
    """Finds the best plan, batch and codecs of a train step on several clusters.

    Goodput is rows per second times the worth of a row. With larger batches, more rows
    are processed per second, but each row is worth less; the noise scale determines how
    much. If the step cannot run on a cluster, the cluster's row states the reason.
    """
    # These modules import JAX, which `--help` must not import.
    from autopar.cli import common, curving

    for path in (out, html):
        common.check_folder(path)
    pairs, more = curving.told_apart(words or [])
    wanted = curving.CurveRequest(
        target=target,
        words=tuple(pairs),
        noise_scale=noise_scale,
        base_batch=base_batch,
        max_batch=max_batch,
        options=asked,
        cache=cache,
        anew=anew,
    )
    return curving.goodput(
        wanted,
        clusters=[*(clusters or []), *more],
        memory=memory,
        processes=processes,
        out=out,
        page=html,
        as_json=as_json,
    )
