"""The texts of all options for planning and running a step.

`autopar.planner.options.PlanOptions` holds the values. A test compares these texts with
the signatures and docstrings of `autopar.plan` and `autopar.parallelize`, with the help
of the commands and with the page of options. The module does not import JAX, so that
``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Time limit of the search on each mesh, in seconds. Most plans are proved optimal
# within a tenth of it. With little memory per device, the solver could go on for
# minutes to close the last percent of the gap.
SOLVER_SECONDS = 10.0
# Number of compiled programs that are kept: enough for a policy that switches codecs,
# or for a cluster that shrinks and grows.
PROGRAMS = 8
# Steps between measurements of codecs' errors and gradient norms. They are frequent
# enough to follow the errors, and add about a hundredth of a step's time.
TELEMETRY_EVERY = 16
# The ``epsilon`` of GraVAC (arXiv 2305.12201).
LEAST_GAIN = 0.75
# The groups of options: of planning, of running, and of the meaning of arguments.
PLANNING, RUNNING, ARGUMENTS = "planning", "running", "arguments"
# The effects of options on the search.
PINS, EXCLUDES, LIMITS, ASKS = "pins", "excludes", "limits", "asks for"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The texts of one option, for all places where it can be given.

    Attributes:
      default: the value of the option if the user gives none.
      text: the meaning of the option, without a full stop.
      expected: the values that the option accepts, as an error message lists them.
      words: the accepted values on the command line, if they are written differently
        there.
      group: `PLANNING`, `RUNNING` or `ARGUMENTS`.
      effect: the effect of a value on the search; '' for options that do not affect it.
      unit: the unit of the option's number; '' without one.
      metavar: the placeholder for the value in the help of a command.
      flag: the option's name on the command line; '' if it has none there.
      takes: the type in signatures of functions, if it is wider than the type in
        `PlanOptions`.
    """

    default: Any
    text: str
    expected: str = ""
    words: str = ""
    group: str = PLANNING
    effect: str = ""
    unit: str = ""
    metavar: str = ""
    flag: str = ""
    takes: str = ""


# Every option by its name, in the order of the functions' parameters.
OPTIONS: Mapping[str, Option] = {
    "pins": Option(
        default=None,
        text="path pattern of an input -> its ``PartitionSpec``, as in "
        '``{"state/params/*/kernel": PartitionSpec(None, "tensor")}``',
        expected="a dictionary of jax.sharding.PartitionSpec, such as "
        "{'params/*': PartitionSpec('data')}",
        effect=PINS,
        metavar="PATH=SPEC",
        flag="--pin",
    ),
    "logical_axis_rules": Option(
        default=None,
        text="Flax's rules, pairs of a logical name and mesh axes; they pin the "
        "arguments that ``nn.with_logical_partitioning`` has named",
        expected="pairs of a logical name and mesh axes, such as "
        "[('embed', 'data'), ('mlp', 'tensor')]",
        effect=PINS,
    ),
    "axis_names": Option(
        default=None,
        text="names of the mesh axes, outermost first; their number is that of "
        "the axes",
        expected="different names, outermost first, such as ('data', 'tensor')",
        words="different names, outermost first, such as data,tensor",
        effect=PINS,
        metavar="NAME,...",
        flag="--axis-names",
    ),
    "max_axes": Option(
        default=None,
        text="most mesh axes to try; None: two, or one for each level of the cluster",
        expected="the most mesh axes to try, a whole number such as 2",
        effect=EXCLUDES,
        metavar="N",
        flag="--max-axes",
    ),
    "seconds": Option(
        default=SOLVER_SECONDS,
        text="time limit of the solver, for each mesh, in seconds of its own "
        "work: a busy machine does not shorten it. Without a limit it goes on "
        "until the plan is proved optimal, and the same call always gives the "
        "same plan; with one, calls may give different plans, whose times differ "
        "by at most the solver's gap",
        expected="the time limit of the solver in seconds, such as 10.0: more "
        "than 0, or None for no limit",
        words="the time limit of the solver in seconds, such as 10: more than 0, "
        "or inf for no limit",
        effect=LIMITS,
        unit="s",
        metavar="{N,inf}",
        flag="--seconds",
    ),
    "planning_seconds": Option(
        default=None,
        text="time limit of the whole search for a plan, in seconds of the clock: all "
        "meshes, microbatches, rematerialised layers, stages and codecs together. When "
        "it is over, the search ends with the best plan so far, and the plan says what "
        "was not tried; without any plan the search goes on to the first one. The work "
        "under way, tracing and the compile check are not cut short. None: no limit",
        expected="the time limit of the whole search in seconds, such as 60.0: more "
        "than 0, or None for no limit",
        words="the time limit of the whole search in seconds, such as 60: more than 0, "
        "or inf for no limit",
        effect=LIMITS,
        unit="s",
        metavar="{N,inf}",
        flag="--planning-seconds",
    ),
    "split_batch": Option(
        default=True,
        text="whether it is an error if no mesh axis divides the rows of the "
        "batch; False: the step is then planned without data parallelism",
        expected="True or False",
        effect=EXCLUDES,
        flag="--split-batch",
    ),
    "compile_check": Option(
        default=True,
        text="whether plans near the limit of memory are compiled "
        "for the cluster's devices, which need not be there, and dropped where they do "
        "not fit (page 'Compilers without devices' of the documentation)",
        expected="True or False",
        effect=EXCLUDES,
        flag="--compile-check",
    ),
    "compression": Option(
        default="none",
        text="how gradients are sent between devices: ``none`` as they are; "
        "``auto`` each as trains fastest within the error budget, chosen together "
        "with the layouts; or the text of a codec for all of them, such as "
        "``int8`` or ``powersgd:rank=4``",
        effect=ASKS,
        metavar="{auto,none,CODEC}",
        flag="--compression",
    ),
    "error_budget": Option(
        default=None,
        text="for ``compression='auto'`` and ``gather_codecs='auto'``, the largest "
        "relative error of the gradients, in the optimizer's metric, with that of "
        "gathered parameters; None: that of int4 codes",
        expected="a number of at least 0, such as 0.05",
        effect=LIMITS,
        metavar="X",
        flag="--error-budget",
    ),
    "gather_codecs": Option(
        default="none",
        text="how sharded parameters are gathered over slow links: ``none`` as they "
        "are; ``auto`` as codes where that is faster, within the error budget; or the "
        "text of a codec, such as ``int8``, for all parameters that are gathered "
        "between hosts (page 'Gradient compression' of the documentation)",
        expected="'none', 'auto' or the text of a codec of blocks, such as 'int8'",
        effect=ASKS,
        metavar="{auto,none,CODEC}",
        flag="--gather-codecs",
    ),
    "cut_codecs": Option(
        default="none",
        text="how pipeline stages send each other activations and cotangents: "
        "``none`` as they are; ``auto`` each as trains fastest within the budget of "
        "errors; or the text of a codec, such as ``int8``, for both or, as in "
        "``int4/int8``, for activations and for cotangents; or a dictionary of the two "
        "(page 'Pipeline stages' of the documentation)",
        expected="'none', 'auto', the text of a codec of blocks such as 'int8' or "
        "'int4/int8', or {'activations': 'int4', 'cotangents': 'int8'}",
        words="none, auto, or the text of a codec of blocks such as int8 or int4/int8",
        effect=ASKS,
        metavar="{auto,none,CODEC[/CODEC]}",
        flag="--cut-codecs",
    ),
    "cut_error_budget": Option(
        default=None,
        text="for ``cut_codecs='auto'``, the largest relative error of the codecs of "
        "all stage cuts together; None: 0.045",
        expected="a number of at least 0, such as 0.1",
        effect=LIMITS,
        metavar="X",
        flag="--cut-error-budget",
    ),
    "layouts": Option(
        default=None,
        text="a plan whose layouts are kept, or its JSON file; only the codecs "
        "are chosen. It may be of another batch size, and edited "
        "(page 'Plan files' of the documentation)",
        effect=PINS,
        metavar="PLAN",
        flag="--layouts",
        takes="Plan | str | os.PathLike[str] | None",
    ),
    "microbatches": Option(
        default=None,
        text="into how many microbatches the batch is split, which run one after "
        "the other before the update; ``auto``: as is fastest of what fits. On "
        "groups of unequal devices also how many each replica runs, such as ``[8, "
        "4]``. None: as the plan given as ``layouts`` says, else ``auto`` "
        "(page 'Microbatches' of the documentation)",
        expected="into how many microbatches the batch is split, a whole number "
        "such as 4, or 'auto'; for replicas of unequal devices, how many each "
        "runs, such as [8, 4]",
        words="into how many microbatches the batch is split, a whole number such "
        "as 4, or auto; for replicas of unequal devices, how many each runs, such "
        "as 8+4",
        effect=PINS,
        metavar="{auto,N,N+M}",
        flag="--microbatches",
    ),
    "coupled": Option(
        default="refuse",
        text="what is done where the loss of a row depends on the other rows: "
        "``refuse`` to split the batch, or take each ``microbatch`` for the batch",
        expected="'refuse', or 'microbatch' to compute what couples the rows of a "
        "batch from those of each microbatch alone",
        effect=ASKS,
        metavar="{refuse,microbatch}",
        flag="--coupled",
    ),
    "stages": Option(
        default=None,
        text="into how many pipeline stages the step is cut; ``auto``: as is "
        "fastest of what fits. None: ``auto``, or one where other options need one "
        "stage (page 'Pipeline stages' of the documentation)",
        expected="into how many pipeline stages the step is cut, a whole number "
        "such as 4, or 'auto'",
        effect=PINS,
        metavar="{auto,N}",
        flag="--stages",
    ),
    "schedule": Option(
        default=None,
        text="in which order stages run their microbatches: ``gpipe``, ``1f1b``, "
        "``interleaved`` or ``zero-bubble``; None: as is fastest, or ``1f1b`` "
        "where the number of stages is given",
        expected="'gpipe', '1f1b', 'interleaved' or 'zero-bubble'",
        effect=PINS,
        metavar="NAME",
        flag="--schedule",
    ),
    "remat": Option(
        default=None,
        text="how many layers compute their activations again in the backward "
        "pass instead of keeping them: a number, ``all``, or with a level: "
        "``4:dots`` keeps matrix products, ``4:kernels`` results of attention kernels, "
        "``4:names=a,b`` the values that `jax.ad_checkpoint.checkpoint_name` names a "
        "and b; ``auto``: as is fastest of what fits; 0: as the step says; "
        "``0:kernels``: the same, but attention kernels run once; ``none`` drops the "
        "step's own ``jax.checkpoint``. None: as the plan given as ``layouts`` says, "
        "else ``auto``, or 0 where the number of stages is given "
        "(page 'Rematerialisation' of the documentation)",
        expected="how many layers compute their activations again, a whole number "
        "such as 4, 'all', '4:dots' or 'all:dots' to keep their matrix products, "
        "'0:kernels' or '4:kernels' to keep results of attention kernels, "
        "'4:names=a,b' to keep the values that checkpoint_name names a and b, 'auto', "
        "or 'none' to drop the step's own jax.checkpoint",
        effect=PINS,
        metavar="{auto,none,N,all}[:dots|:kernels|:names=A,B]",
        flag="--remat",
    ),
    "offload": Option(
        default=None,
        text="which state lies in the memory of the hosts between steps: "
        "``optimizer``: all arrays of optimizer state; ``state``: these and "
        "all parameters; ``none``: what the step itself puts there; ``auto``: "
        "as much optimizer state, and then parameters, as is fastest, where "
        "memory is short. None: as the plan given "
        "as ``layouts`` says, else ``auto``, or ``none`` where the "
        "number of stages is given (page 'Memory of the hosts' of the "
        "documentation)",
        expected="'auto', 'none', 'optimizer' or 'state'",
        effect=PINS,
        metavar="{auto,none,optimizer,state}",
        flag="--offload",
    ),
    "compiler_options": Option(
        default=None,
        text="options of XLA's compiler for the programs of the plan, by name, as in "
        "``{'xla_gpu_enable_pipelined_collectives': True}``; the plan records them, "
        "and compilations without devices use them, too. Predictions do not know what "
        "they change. None: those of the plan given as ``layouts``",
        expected="names of options of XLA with their values, such as "
        "{'xla_gpu_enable_pipelined_collectives': True}",
        words="names of options of XLA with their values, such as "
        "xla_gpu_enable_pipelined_collectives=true",
        metavar="NAME=VALUE",
        flag="--compiler-option",
    ),
    "donate": Option(
        default=True,
        text="whether a call consumes the carried state",
        expected="True or False",
        group=RUNNING,
    ),
    "programs": Option(
        default=PROGRAMS,
        text="most compiled programs to keep, by plan and devices",
        expected="the most compiled programs to keep, at least 1; the default is "
        f"{PROGRAMS}",
        group=RUNNING,
    ),
    "fallback": Option(
        default=(),
        text="codecs to try, in this order, in a step in which the plan's codecs "
        "send too little; the last one always sends. Needs ``compression=``",
        group=RUNNING,
    ),
    "least_gain": Option(
        default=LEAST_GAIN,
        text="the least part of the gradients' squared norm that a codec must "
        "send; below it the next codec of ``fallback`` is tried",
        expected="a part of the squared norm, a number of at least 0; the "
        f"default is {LEAST_GAIN}",
        group=RUNNING,
    ),
    "telemetry_every": Option(
        default=TELEMETRY_EVERY,
        text="the telemetry of codecs is measured in one step of so many; in all "
        "of them with a policy or a fallback",
        expected="a number of steps, at least 1, which measures all; the default "
        f"is {TELEMETRY_EVERY}",
        group=RUNNING,
        unit="steps",
    ),
    "last_batch": Option(
        default="run",
        text="what a batch of fewer rows than the planned one does, such as the "
        "last of an epoch: ``run`` as it is, split over as many devices as divide "
        "it; ``drop`` the rows that the plan's split does not divide; ``pad`` it "
        "with its last row, which then counts more than once",
        expected="'run' (as many devices as divide the rows), 'drop' (rows beyond "
        "the last split) or 'pad' (the last row, repeated)",
        group=RUNNING,
    ),
    "cache": Option(
        default=None,
        text="a folder where plans and, by JAX's compilation cache, compiled "
        "programs are kept for the next process; None: that of ``AUTOPAR_CACHE``, "
        "or none",
        group=RUNNING,
    ),
    "static_argnames": Option(
        default=(),
        text="names of arguments that are part of the program, as for "
        "``jax.jit``; flags (``bool``), texts and members of enumerations always "
        "are",
        group=ARGUMENTS,
    ),
    "batch_argnames": Option(
        default=None,
        text="names of the arguments that hold the batch, or patterns of paths "
        "such as ``batch/*``; with the dimension of the rows where it is not "
        'found: ``{"batch/x": 1}``. None: found from what the step does with its '
        "arguments",
        group=ARGUMENTS,
    ),
    "frozen_argnames": Option(
        default=(),
        text="names of arguments that the step does not return and that are the same "
        "for all rows, such as the weights of a teacher; without names they are found, "
        "as the batch is",
        group=ARGUMENTS,
    ),
    "whole_argnames": Option(
        default=(),
        text="names of arguments of which each of several processes passes the whole "
        "array, instead of rows of its own. Plans then exchange no rows; the processes "
        "check in each step that they pass equal values",
        group=ARGUMENTS,
    ),
}


def reference_lines(group: str) -> list[str]:
    """The rows of the options' page, in Markdown."""
    rows = [
        "| Option | Command line | Default | In the search | Meaning |",
        "|---|---|---|---|---|",
    ]
    for name, option in OPTIONS.items():
        if option.group != group:
            continue
        default = option.default
        words = f"{option.flag} {option.metavar}".strip()
        if isinstance(default, bool) and option.flag:
            words = option.flag.replace("--", "--no-")
        unit = f" {option.unit}" if option.unit else ""
        cells = (
            f"`{name}`",
            f"`{words}`" if words else "",
            f"`{default!r}`{unit}",
            option.effect,
            option.text.replace("``", "`"),
        )
        escaped = [cell.replace("|", r"\|") for cell in cells]
        rows.append(f"| {' | '.join(escaped)} |")
    return rows
