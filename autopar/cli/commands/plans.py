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
    """The cluster of a command that plans.

    Attributes:
      cluster: Such as 8x8:h100 (hosts x devices), a TOML file, or local.
    """

    cluster: str | None = option(None, metavar="SPEC")


@record
class MemoryOptions:
    """The memory of the devices of a command that plans.

    Attributes:
      memory: Memory of a device to use, such as 40GB.
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
      explain_search: Also print what was proposed, and how fast it is.
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

    With --by it prints the work and communication of each operator or layer; the rows
    add up to the step. With --tensor it prints the layout of each matching input, the
    communication that this layout causes, and the time of the best plan with each of
    some other layouts. It also prints the codec of the input's gradient, and the costs
    of other codecs.

    Attributes:
      source: A plan.json, or a target.
      words: Where the plan does not know its target; arguments to change.
      tensor: Inputs to explain, such as 'state/params/*/kernel'.
      limit: Other layouts to try of each.
      seconds: Time limit of the solver for each layout.
      by: Attribute the whole step to these.
      top: Most rows of a table; others are added up.
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
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed. With --compile the step is also compiled for simulated
    CPU devices, and the memory of the compiled step is read. With --target it is
    compiled with the accelerator's own compiler instead, which an extra installs.

    Attributes:
      source: A plan.json, or a target.
      words: Where the plan does not know its target; arguments to change.
      compiled: Compile for simulated devices too; slower.
      target: Compile with the compiler of h100, a100, b200, v5e or v5p.
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
    or tensor parallelism in each stage. These have the given --schedule and
    --microbatches, too.

    Saved plans are compared without planning again, on their cluster.

    With --compression only the plan has codecs, the usual plans have none.

    With --measure all plans that fit are run and timed on this process's devices. For a
    cluster of CPU devices, the devices are simulated.

    Attributes:
      target: A target, or a plan.json.
      words: Other saved plans of the step; arguments of the target's function.
      measure: Run the plans on this process's devices.
      repeats: Turns of three timed steps for each plan.
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

    The table has a row for each combination. Below it stands the largest number of
    devices whose efficiency is high enough. The efficiency is the speed-up over one
    device, divided by the number of devices. Ctrl-C ends the sweep and prints the rows
    that are done.

    Attributes:
      target: file.py:function or module:function.
      words: Arguments of the target's function: 8,16 or 8..64, which doubles, or
        8..32+8, in steps.
      cluster: Such as 8x8:h100, or 1..8x8:h100 for several. Repeatable.
      largest: Find the largest value that fits, of batch for example.
      efficiency: The least of devices that are worth it.
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
      words: Arguments of the target's function, and more clusters.
      clusters: Such as 1:h100 2:h100 8x8:h100, or 1..8x8:h100. Repeatable.
      noise_scale: Noise scale of the gradients, in rows.
      base_batch: Rows of the base batch; the target's otherwise.
      max_batch: Rows of the largest batch.
      anew: Plan each cluster from nothing, not from its neighbour.
      processes: Plan in so many processes.
      cache: A folder that keeps plans for the next time.
      out: Where to save the curve as JSON.
      html: Where to write a page with a picture.
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
