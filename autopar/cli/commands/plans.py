"""The commands that plan: plan, explain, audit, compare, sweep and goodput."""

import pathlib
from typing import Any

from autopar.cli.options import (
    DevicesOptions,
    JsonOptions,
    argument,
    command,
    option,
    planning,
    record,
)


@record
class ClusterOptions:
    """The cluster for which a command plans.

    Attributes:
      cluster: The cluster, such as 8x8:h100 (hosts x devices), a TOML file, or local.
    """

    cluster: str | None = option(None, metavar="SPEC")


@record
class MemoryOptions:
    """The memory of the devices for which a command plans.

    Attributes:
      memory: Memory of each device that the step may use, such as 40GB.
    """

    memory: str | None = option(None, metavar="SIZE")


@command(
    "plan", "planning.plan", "plan train.py:workload --cluster 8x8:h100 --out plan.json"
)
class PlanCommand(ClusterOptions, JsonOptions, MemoryOptions):
    """Finds the fastest plan of a train step on a cluster, and prints it.

    The target's function returns (train_step, state, batch); arrays may be
    jax.ShapeDtypeStruct, so nothing of the model's size is allocated.

    Attributes:
      target: file.py:function or module:function.
      words: Arguments of the target's function.
      out: Where to save the plan as JSON.
      html: Where to write a page about the plan.
      explain_search: Also print the plans that the search proposed, with their
        predicted times.
      trace: Where to write the predicted schedule of stages, for Perfetto.
      limits: the planning options.
    """

    target: str = argument()
    words: list[str] | None = argument(None, metavar="[KEY=VALUE]...")
    out: pathlib.Path | None = None
    html: pathlib.Path | None = None
    explain_search: bool = False
    trace: pathlib.Path | None = None
    limits: Any = planning()


@command(
    "explain",
    "explaining.explain",
    "explain plan.json --tensor 'state/params/*/kernel'",
)
class ExplainCommand(ClusterOptions, JsonOptions):
    """Shows where a step's time and memory go, or why an input has its layout.

    With --by it prints the seconds of work and communication of each operator or layer;
    the rows add up to the step. With --tensor it prints the layout of each matching
    input, the communication that this layout causes, and the time of the best plan with
    each of some other layouts. It also prints the codec of the input's gradient, and
    the costs of other codecs.

    Attributes:
      source: A plan.json, or a target.
      words: The target, if the plan does not name it; arguments to change.
      tensor: Inputs to explain, such as 'state/params/*/kernel'.
      limit: Number of other layouts to try for each input.
      seconds: Time limit of the solver for each layout.
      by: Divide the time of the whole step among these.
      top: Most rows of a table; the other rows are combined.
      limits: the planning options.
    """

    source: str = argument(metavar="PLAN")
    words: list[str] | None = argument(None, metavar="[TARGET] [KEY=VALUE]...")
    tensor: str | None = None
    limit: int = option(6, "--alternatives", min=0)
    seconds: float = option(3.0, min=0.1)
    by: str | None = option(None, metavar="{operator,layer}")
    top: int = option(20, min=1)
    limits: Any = planning(without=("seconds",))


@command("audit", "planning.audit", "audit plan.json --compile")
class AuditCommand(ClusterOptions, JsonOptions):
    """Partitions a planned step, and compares its communication with the plan's.

    No device is needed. With --compile the step is also compiled for simulated CPU
    devices, and the memory of the compiled step is read. With --target it is compiled
    by the compiler of an accelerator instead, which an extra of this package installs.

    Attributes:
      source: A plan.json, or a target.
      words: The target, if the plan does not name it; arguments to change.
      compiled: Also compile the step for simulated devices; this takes longer.
      target: Compile by the compiler of this accelerator: h100, a100, b200, v5e or v5p.
      limits: the planning options.
    """

    source: str = argument(metavar="PLAN")
    words: list[str] | None = argument(None, metavar="[TARGET] [KEY=VALUE]...")
    compiled: bool = option(False, "--compile")
    target: str | None = option(None, metavar="DEVICE")
    limits: Any = planning()


@command(
    "compare",
    "comparing.compare",
    "compare train.py:workload --cluster 8:cpu --measure",
)
class CompareCommand(DevicesOptions, ClusterOptions, MemoryOptions, JsonOptions):
    """Compares the plan with the usual ones: data parallel, ZeRO, tensor parallel ...

    With --stages, the plan is also compared with pipelines of equal stages, with data
    or tensor parallelism in each stage. --schedule and --microbatches apply to these
    pipelines, too.

    Saved plans are compared on their own cluster, without planning again.

    With --compression, only the plan has codecs; the usual plans have none.

    With --measure all plans that fit are run and timed on this process's devices. For a
    cluster of CPU devices, the devices are simulated.

    Attributes:
      target: A target, or a plan.json.
      words: Other saved plans of the step, or arguments of the target's function.
      measure: Run the plans on this process's devices.
      repeats: Number of turns, each with three timed steps of every plan.
      limits: the planning options.
    """

    target: str = argument(metavar="TARGET")
    words: list[str] | None = argument(None, metavar="[PLAN]... [KEY=VALUE]...")
    measure: bool = False
    repeats: int = option(5, min=1)
    limits: Any = planning()


@command(
    "sweep",
    "sweeping.sweep",
    "sweep train.py:workload --cluster 1..8x8:h100 batch=64..1024",
)
class SweepCommand(MemoryOptions, JsonOptions):
    """Plans a train step for ranges of its options, on several clusters.

    The table has a row for each combination. The line below it has the largest number
    of devices whose efficiency is at least --efficiency. The efficiency is the speed-up
    over one device, divided by the number of devices. Ctrl-C ends the sweep and prints
    the rows that are done.

    Attributes:
      target: file.py:function or module:function.
      words: Arguments of the target's function, with values such as 8,16 or 8..64
        (doubling) or 8..32+8 (in steps of 8).
      cluster: The cluster, such as 8x8:h100, or 1..8x8:h100 for several clusters.
        Repeatable.
      largest: Find the largest value of this option that fits, such as batch.
      efficiency: The least efficiency of a worthwhile number of devices.
      cache: A folder that keeps plans for the next sweep.
      limits: the planning options.
    """

    target: str = argument()
    words: list[str] | None = argument(None, metavar="[KEY=RANGE]...")
    cluster: list[str] | None = option(None, metavar="SPEC")
    largest: str | None = option(None, metavar="KEY")
    efficiency: float = option(0.7, min=0.0, max=1.0)
    cache: pathlib.Path | None = None
    limits: Any = planning()


@command(
    "goodput",
    "curving.goodput",
    "goodput train.py:workload --clusters 1:h100 8:h100 8x8:h100",
)
class GoodputCommand(MemoryOptions, JsonOptions):
    """Finds the best plan, batch and codecs of a train step on several clusters.

    Goodput is rows per second times the worth of a row. With larger batches, more rows
    are processed per second, but each row is worth less; the noise scale determines how
    much. If the step cannot run on a cluster, the cluster's row states the reason.

    Attributes:
      target: file.py:function or module:function.
      words: Arguments of the target's function, and further clusters.
      clusters: Clusters such as 1:h100 2:h100 8x8:h100, or 1..8x8:h100. Repeatable.
      noise_scale: Noise scale of the gradients, in rows.
      base_batch: Rows of the base batch; by default those of the target's batch.
      max_batch: Rows of the largest batch to consider.
      anew: Plan each cluster from scratch, not from the plan of its neighbour.
      processes: Number of processes that plan.
      cache: A folder that keeps plans for later calls.
      out: Where to save the curve as JSON.
      html: Where to save a page with a picture of the curve.
      limits: the planning options.
    """

    target: str = argument()
    words: list[str] | None = argument(None, metavar="[KEY=VALUE]... [CLUSTER]...")
    clusters: list[str] | None = option(None, metavar="SPEC...")
    noise_scale: float | None = option(None, min=0.0)
    base_batch: int | None = option(None, min=1)
    max_batch: int | None = option(None, min=1)
    anew: bool = False
    processes: int | None = option(None, min=1)
    cache: pathlib.Path | None = None
    out: pathlib.Path | None = None
    html: pathlib.Path | None = None
    limits: Any = planning(without=("layouts", "microbatches", "stages", "schedule"))
