"""Planning and auditing as functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.audits import audit_analysis
from autopar.cluster import Cluster
from autopar.compilers.options import CompilerOptions
from autopar.planner.edited import carried_out
from autopar.planner.hints import LogicalRules, Pins
from autopar.planner.option_texts import SOLVER_SECONDS
from autopar.planner.options import (
    PlanOptions,
    as_cluster,
    as_plan,
    with_logical_pins,
)
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.progress import show_progress
from autopar.reports.audit import Audit
from autopar.runtime.compile_check import plan_that_fits
from autopar.steps.analysis import analyse, analyse_call
from autopar.steps.state import warn_of_state
from autopar_passes.jax_meshes import without_mesh
from autopar_passes.program.calls import BatchNames, NamedRoles
from autopar_passes.program.trace import open_arguments


@without_mesh()
def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str,
    pins: Pins | None = None,
    logical_axis_rules: LogicalRules | None = None,
    axis_names: Sequence[str] | None = None,
    max_axes: int | None = None,
    seconds: float | None = SOLVER_SECONDS,
    planning_seconds: float | None = None,
    split_batch: bool = True,
    compile_check: bool = True,
    compression: str = "none",
    error_budget: float | None = None,
    gather_codecs: str = "none",
    cut_codecs: str | Mapping[str, str] = "none",
    cut_error_budget: float | None = None,
    layouts: Plan | str | os.PathLike[str] | None = None,
    microbatches: int | str | Sequence[int] | None = None,
    coupled: str = "refuse",
    stages: int | str | None = None,
    schedule: str | None = None,
    remat: int | str | None = None,
    offload: str | None = None,
    compiler_options: CompilerOptions | None = None,
    kwargs: Mapping[str, Any] | None = None,
    static_argnames: Sequence[str] = (),
    batch_argnames: BatchNames = None,
    frozen_argnames: str | Sequence[str] = (),
    whole_argnames: str | Sequence[str] = (),
) -> Plan:
    """Finds the execution plan of a train step that is fastest on a cluster.

    Args:
      step: a train step: ``step(state, batch)`` with a Linen ``TrainState``,
        ``step(params, opt_state, batch)``, or NNX ``step(model, optimizer, batch)``. If
        the step returns a value with the structure of an argument, this argument is
        carried state. NNX objects are carried state, too.
      args: the step's arguments, arrays or ``jax.ShapeDtypeStruct``s.
      cluster: the cluster to plan for, or its text, such as ``2x4:h100``; its devices
        are not needed.
      pins: path pattern of an input -> its ``PartitionSpec``, as in
        ``{"state/params/*/kernel": PartitionSpec(None, "tensor")}``.
      logical_axis_rules: Flax's rules, pairs of a logical name and mesh axes; they pin
        the arguments that ``nn.with_logical_partitioning`` has named.
      axis_names: names of the mesh axes, outermost first; their number is that of the
        axes.
      max_axes: most mesh axes to try; None: two, or one for each level of the cluster.
      seconds: time limit of the solver, for each mesh, in seconds of its own work: a
        busy machine does not shorten it. Without a limit it goes on until the plan is
        proved optimal, and the same call always gives the same plan; with one, calls
        may give different plans, whose times differ by at most the solver's gap.
      planning_seconds: time limit of the whole search for a plan, in seconds of the
        clock: all meshes, microbatches, rematerialised layers, stages and codecs
        together. When it is over, the search ends with the best plan so far, and the
        plan says what was not tried; without any plan the search goes on to the first
        one. The work under way, tracing and the compile check are not cut short. None:
        no limit.
      split_batch: whether it is an error if no mesh axis divides the rows of the batch;
        False: the step is then planned without data parallelism.
      compile_check: whether plans near the limit of memory are compiled for the
        cluster's devices, which need not be there, and dropped where they do not fit
        (page 'Compilers without devices' of the documentation).
      compression: how gradients are sent between devices: ``none`` as they are;
        ``auto`` each as trains fastest within the error budget, chosen together with
        the layouts; or the text of a codec for all of them, such as ``int8`` or
        ``powersgd:rank=4``.
      layouts: a plan whose layouts are kept, or its JSON file; only the codecs are
        chosen. It may be of another batch size, and edited (page 'Plan files' of the
        documentation).
      microbatches: into how many microbatches the batch is split, which run one after
        the other before the update; ``auto``: as is fastest of what fits. On groups of
        unequal devices also how many each replica runs, such as ``[8, 4]``. None: as
        the plan given as ``layouts`` says, else ``auto`` (page 'Microbatches' of the
        documentation).
      coupled: what is done where the loss of a row depends on the other rows:
        ``refuse`` to split the batch, or take each ``microbatch`` for the batch.
      stages: into how many pipeline stages the step is cut; ``auto``: as is fastest of
        what fits. None: ``auto``, or one where other options need one stage (page
        'Pipeline stages' of the documentation).
      schedule: in which order stages run their microbatches: ``gpipe``, ``1f1b``,
        ``interleaved`` or ``zero-bubble``; None: as is fastest, or ``1f1b`` where the
        number of stages is given.
      remat: how many layers compute their activations again in the backward pass
        instead of keeping them: a number, ``all``, or with a level: ``4:dots`` keeps
        matrix products, ``4:kernels`` results of attention kernels, ``4:names=a,b`` the
        values that `jax.ad_checkpoint.checkpoint_name` names a and b; ``auto``: as is
        fastest of what fits; 0: as the step says; ``0:kernels``: the same, but
        attention kernels run once; ``none`` drops the step's own ``jax.checkpoint``.
        None: as the plan given as ``layouts`` says, else ``auto``, or 0 where the
        number of stages is given (page 'Rematerialisation' of the documentation).
      offload: which state lies in the memory of the hosts between steps: ``optimizer``:
        all arrays of optimizer state; ``state``: these and all parameters; ``none``:
        what the step itself puts there; ``auto``: as much optimizer state, and then
        parameters, as is fastest, where memory is short. None: as the plan given as
        ``layouts`` says, else ``auto``, or ``none`` where the number of stages is given
        (page 'Memory of the hosts' of the documentation).
      compiler_options: options of XLA's compiler for the programs of the plan, by name,
        as in ``{'xla_gpu_enable_pipelined_collectives': True}``; the plan records them,
        and compilations without devices use them, too. Predictions do not know what
        they change. None: those of the plan given as ``layouts``.
      error_budget: for ``compression='auto'`` and ``gather_codecs='auto'``, the
        largest relative error of the gradients, in the optimizer's metric, with that
        of gathered parameters; None: that of int4 codes.
      gather_codecs: how sharded parameters are gathered over slow links: ``none`` as
        they are; ``auto`` as codes where that is faster, within the error budget; or
        the text of a codec, such as ``int8``, for all parameters that are gathered
        between hosts (page 'Gradient compression' of the documentation).
      cut_codecs: how pipeline stages send each other activations and cotangents:
        ``none`` as they are; ``auto`` each as trains fastest within the budget of
        errors; or the text of a codec, such as ``int8``, for both or, as in
        ``int4/int8``, for activations and for cotangents; or a dictionary of the two
        (page 'Pipeline stages' of the documentation).
      cut_error_budget: for ``cut_codecs='auto'``, the largest relative error of the
        codecs of all stage cuts together; None: 0.045.
      kwargs: the step's arguments that are given by name.
      static_argnames: names of arguments that are part of the program, as for
        ``jax.jit``; flags (``bool``), texts and members of enumerations always are.
      batch_argnames: names of the arguments that hold the batch, or patterns of paths
        such as ``batch/*``; with the dimension of the rows where it is not found:
        ``{"batch/x": 1}``. None: found from what the step does with its arguments.
      frozen_argnames: names of arguments that the step does not return and that are the
        same for all rows, such as the weights of a teacher; without names they are
        found, as the batch is.
      whole_argnames: names of arguments of which each of several processes passes the
        whole array, instead of rows of its own. Plans then exchange no rows; the
        processes check in each step that they pass equal values.

    Raises:
      TraceError: JAX cannot trace the step.
      InfeasibleError: no plan fits the memory of a device.
      ClusterError: the text describes no cluster.
      PlanError: a pin does not fit, the batch cannot be split, or an option is wrong.
    """
    options = PlanOptions(
        pins=pins,
        logical_axis_rules=logical_axis_rules,
        axis_names=axis_names,
        max_axes=max_axes,
        seconds=seconds,
        planning_seconds=planning_seconds,
        split_batch=split_batch,
        compile_check=compile_check,
        compression=compression,
        error_budget=error_budget,
        gather_codecs=gather_codecs,
        cut_codecs=cut_codecs,
        cut_error_budget=cut_error_budget,
        layouts=None if layouts is None else as_plan(layouts, "layouts"),
        microbatches=microbatches,
        coupled=coupled,
        stages=stages,
        schedule=schedule,
        remat=remat,
        offload=offload,
        compiler_options=compiler_options,
        static_argnames=static_argnames,
        batch_argnames=batch_argnames,
        frozen_argnames=frozen_argnames,
        whole_argnames=whole_argnames,
    )
    made_for = as_cluster(cluster)
    roles = NamedRoles.of(batch_argnames, frozen_argnames, whole_argnames)
    with show_progress("tracing the step"):
        call = open_arguments(step, args, kwargs, static_argnames, roles)
        analysis = analyse_call(step, call)
        warn_of_state(step, analysis)
        hints = with_logical_pins(options, call)
        return plan_that_fits(
            analysis,
            made_for,
            hints,
            lambda on, unfit: plan_analysis(analysis, on, hints, unfit=unfit),
        )


@without_mesh()
def audit(
    step: Callable[..., Any],
    *args: Any,
    plan: Plan | str | os.PathLike[str],
    cluster: Cluster | str | None = None,
    compiled: bool = False,
    target: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    static_argnames: Sequence[str] = (),
    batch_argnames: BatchNames = None,
    frozen_argnames: str | Sequence[str] = (),
    whole_argnames: str | Sequence[str] = (),
) -> Audit:
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed unless the step is compiled. In a plan of several stages, each
    task of a stage is a program. The bytes that stages send to each other are then
    compared, too.

    Args:
      step: the train step that the plan was made for.
      args: the step's arguments, arrays or ``jax.ShapeDtypeStruct``s.
      plan: the plan, or its JSON file. Edits of the plan are applied first.
      cluster: the cluster that the plan was made for, or its text; default: the cluster
        in the plan.
      compiled: whether to compile the step for this process's devices, too, and to read
        communication and memory from the compiled program.
      target: an accelerator (``h100``, ``a100``, ``b200``, ``v5e``, ``v5p`` ...) whose
        compiler also compiles the step. The accelerator itself is not needed; the
        compiler comes with ``autopar[gpu-compiler]`` or ``autopar[tpu-compiler]``. On
        groups of unequal devices, the stages or the replica on this accelerator are
        compiled.
      kwargs: the step's arguments that are given by name.
      static_argnames: names of arguments that are part of the program, as for
        ``jax.jit``; flags (``bool``), texts and members of enumerations always are.
      batch_argnames: names of the arguments that hold the batch, or patterns of paths
        such as ``batch/*``; with the dimension of the rows where it is not found:
        ``{"batch/x": 1}``. None: found from what the step does with its arguments.
      frozen_argnames: names of arguments that the step does not return and that are the
        same for all rows, such as the weights of a teacher; without names they are
        found, as the batch is.
      whole_argnames: names of arguments of which each of several processes passes the
        whole array, instead of rows of its own. Plans then exchange no rows; the
        processes check in each step that they pass equal values.

    Raises:
      PlanError: the plan is for another step or cluster, or for another kind of
        device than the target, or the target's compiler is not installed.
      CompileError: the target's compiler refuses the step.
    """
    found = as_plan(plan)
    made_for = found.cluster.read() if cluster is None else as_cluster(cluster)
    roles = NamedRoles.of(batch_argnames, frozen_argnames, whole_argnames)
    analysis = analyse(step, args, kwargs, static_argnames, roles)
    held = carried_out(analysis, found, made_for, seconds=SOLVER_SECONDS)
    return audit_analysis(analysis, held, made_for, compiled=compiled, target=target)
