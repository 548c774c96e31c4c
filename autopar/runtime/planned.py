"""A planned step, and the jitted function of a planned step with one stage.

The *flat* arguments and results of a step are its arrays, in order. A *guarded* step
keeps its old state if a result is not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar.compilers.options import CompilerValue, joined
from autopar.compilers.targets import room_options
from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.compression.synchronise import Fallback
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.planner.option_texts import TELEMETRY_EVERY
from autopar.planner.record import restore
from autopar.plans import Plan
from autopar.runtime.compiler import compile_lowered
from autopar.runtime.gradients.probing import partial_gradients
from autopar.runtime.gradients.state_restorer import (
    Soundness,
    StateRestorer,
    early_state,
    is_finite,
    restored_state,
    with_old_state,
)
from autopar.runtime.gradients.sums import AnySums, GradientSums, gradient_sums
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.runtime.noise.averages import NoiseOptions, NoiseSpec, with_waiting
from autopar.runtime.noise.meter import NoiseMeter, WholeNoise, whole_noise
from autopar.runtime.stages.pipeline import StagePipeline
from autopar.runtime.stages.transport import Links
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.jax_compat import lowered_without_devices
from autopar_passes.layouts import HOST_MEMORY, mesh_sharding
from autopar_passes.replay.replicas import Replicas, Wait
from autopar_passes.replay.run import replay
from autopar_passes.rules.factor_rule import KernelWork

# JAX's name of the platform that a program is lowered for, by kind of device.
_LOWERED_FOR = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


def kernels_of(graph: OperatorGraph) -> tuple[KernelWork, ...]:
    """Returns the kernels of a graph, without repetitions."""
    return tuple(dict.fromkeys(op.kernel for op in graph.operators if op.kernel))


def lowering_platform(graph: OperatorGraph, kind: str) -> str:
    """Returns the platform for which a program is lowered without devices.

    Args:
      graph: the graph of the step. A step without kernels can be lowered for any
        platform, and is lowered for CPUs because every host can do this.
      kind: the kind of the cluster's devices: "gpu", "tpu" or "cpu".

    Raises:
      PlanError: no platform can run all of the kernels.
    """
    bound = [k for k in kernels_of(graph) if k.platforms]
    if not bound:
        return _LOWERED_FOR["cpu"]
    common = set.intersection(*(set(k.platforms) for k in bound))
    if not common:
        names = ", ".join(f"'{k.name}' ({' or '.join(k.platforms)})" for k in bound)
        raise PlanError(
            f"no device can run all kernels of this step: {names}. Use kernels that "
            "were written for the same kind of device."
        )
    return _LOWERED_FOR[kind if kind in common else min(common)]


def check_runnable(step: str, graph: OperatorGraph, devices: Iterable[object]) -> None:
    """Checks that the kernels of a step can run on devices.

    Args:
      step: name of the step.
      graph: the graph of the step.
      devices: JAX's devices, each with a ``platform``.

    Raises:
      PlanError: a kernel was written for other devices.
    """
    platforms = {str(getattr(d, "platform", "")) for d in devices}
    found = {_kind(p) for p in platforms}
    wrong = [
        k for k in kernels_of(graph) if k.platforms and not found <= {*k.platforms}
    ]
    if wrong:
        raise PlanError(_message(step, wrong, sorted(platforms)))


def _kind(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def _message(step: str, wrong: Sequence[KernelWork], platforms: Sequence[str]) -> str:
    first = wrong[0]
    return (
        f"the step '{step}' cannot run on {', '.join(platforms)} devices: its kernel "
        f"'{first.name}' runs on {' or '.join(first.platforms)} devices only. "
        "Planning needs no device: save the plan here, and run it where the devices "
        "are. To run the step here, use an attention without kernels."
    )


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The flat step under a plan: one program, or the tasks of several stages.

    Attributes:
      analysis: the analysis of the step. With one stage its batch is split into the
        plan's microbatches; with several stages it has the whole batch.
      plan: the plan.
      function: runs a step on the flat arguments. With ``sums`` it also takes the
        codecs' state after the flat arguments. It then returns the flat results, the
        new state, a row of telemetry for each gradient, and the fallback level of each
        gradient. With ``noise``, its last argument and its last result are the averages
        of the noise scale.
      mesh: the mesh that the step runs on (abstract if the step is only lowered). With
        several stages it has the devices of all stages, in order.
      in_shardings: the sharding of each flat argument before a step. State has the
        sharding that it keeps between steps; the batch is on the first stage that reads
        it.
      meshes: the meshes of the state: the mesh of each stage, and the mesh of all
        stages if the plan uses it.
      sums: how the program sums gradients over devices; None if the compiler inserts
        all these sums.
      sums_of: returns ``sums`` for a plan that differs only in codec parameters that
        are inputs of the program (so that changing them needs no compilation).
      gradients: a function of the flat arguments; returns, by name, the partial
        gradients of this process's stages that are large enough for a codec. None if
        there are no such gradients.
      noise: how the step measures the noise of gradients; None if it does not.
      guard: whether the step is guarded. Its last flat result then says whether all
        results are finite.
      pipeline: the tasks of several stages; None with one stage, whose program is
        ``function``.
    """

    analysis: Analysis
    plan: Plan
    function: Any
    mesh: Any
    in_shardings: list[NamedSharding]
    meshes: tuple[Any, ...]
    sums: AnySums | None = None
    sums_of: Callable[[Plan], AnySums | None] = lambda _: None
    gradients: Any = None
    noise: NoiseSpec | None = None
    guard: bool = False
    pipeline: StagePipeline | None = None

    @property
    def links(self) -> Links | None:
        """The links to the other processes of a pipeline; None if there are none."""
        return None if self.pipeline is None else self.pipeline.links

    def with_inputs_of(self, plan: Plan) -> PlannedStep:
        """Returns the step under a plan with other codec parameters, as inputs.

        Args:
          plan: the other plan, with an equal
            `autopar.planner.codecs.adjusted.program_plan`.
        """
        return dataclasses.replace(self, plan=plan, sums=self.sums_of(plan))

    def lower(self, platform: str | None = None) -> Any:
        """Returns JAX's ``Lowered`` of the planned program.

        Args:
          platform: JAX's name of the platform to lower for, used on an abstract mesh;
            None for a platform that has the program's kernels. On a mesh of devices,
            JAX lowers for their platform.

        Raises:
          PlanError: the plan has several stages, so no program of the whole step
            exists.
        """
        if self.pipeline is not None:
            raise PlanError(
                f"a plan of {len(self.plan.stages)} stages has no program of the whole "
                "step to lower: each task is a program of its own."
            )
        abstract = isinstance(self.mesh, AbstractMesh)
        graph = self.analysis.graph
        values = [graph.values[i.value] for i in graph.inputs]
        structs: list[Any] = [
            jax.ShapeDtypeStruct(
                v.shape, v.dtype, sharding=None if abstract and not v.on_host else s
            )
            for v, s in zip(values, self.in_shardings, strict=True)
        ]
        for beside in (self.sums, self.noise):
            if beside is not None:
                state = beside.structs()
                structs.append(
                    state
                    if abstract
                    else jax.tree.map(_struct_in_place, state, beside.shardings())
                )
        traced = self.function.trace(*structs)
        if abstract:
            cluster = self.plan.cluster.read()
            # All groups of replicas run the same program, so lowering it for one
            # group is enough.
            kind = (cluster.groups[0] if cluster.groups else cluster).device.kind
            platform = platform or lowering_platform(graph, kind)
            with lowered_without_devices():
                return traced.lower(lowering_platforms=(platform,))
        return traced.lower()

    def compile(self) -> None:
        """Compiles the programs, so that calls with placed arguments need not compile.

        JAX also looks up compiled code by the shardings of the arguments. The structs
        for which the program is lowered therefore have shardings.
        """
        if self.pipeline is None:
            compile_lowered(self.lower())
        else:
            self.pipeline.compile()

    def settle_results(
        self, placed: Sequence[Any], flat: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Returns the flat results of a guarded step, and whether all are finite.

        With one stage, the program itself restores the state, and its last result says
        whether all results are finite. With several stages, this method checks the
        results and restores the state: each process checks the parts that it holds.

        Args:
          placed: the flat arguments of the step.
          flat: the results that the step returned.
        """
        if self.pipeline is None:
            *own, finite = flat
            return own, finite
        finite = is_finite(self.analysis, flat)
        if self.links is not None:
            finite = self.links.agree(finite, "looking at the results of a step")
        if finite:
            return list(flat), True
        return with_old_state(self.analysis, placed, flat), False


def planned_step(
    analysis: Analysis,
    plan: Plan,
    mesh: Any,
    *,
    donate: bool = True,
    gradients: Any = None,
    fallback: Fallback | None = None,
    noise: NoiseOptions | None = None,
    signals: bool = False,
    every: int = TELEMETRY_EVERY,
    guard: bool = False,
    wait: Wait | None = None,
    turns: int | None = None,
) -> PlannedStep:
    """Builds the jitted function of a planned step.

    Args:
      analysis: the step the plan was made for.
      plan: the plan.
      mesh: from `device_mesh` or `abstract_mesh`.
      donate: whether the carried state is consumed by the call.
      gradients: ``PlannedStep.gradients`` of a step that differs only in codecs.
      fallback: the codecs to use in steps in which the plan's codecs would send too
        small a fraction of the gradient.
      noise: how the step measures the noise of gradients; None if it does not.
      signals: whether the step measures the signal in the sent gradients.
      every: telemetry is measured once in this many steps.
      guard: whether to build a guarded step.
      wait: for plans with replicas: a function that waits in each microbatch of a
        replica, to simulate slower devices (`autopar_passes.replay.replicas.Replicas`).
      turns: for plans with replicas: a number of microbatches that all replicas run
        instead of the plan's, used only by audits; None for the plan's numbers.

    Raises:
      PlanError: the plan belongs to another step, or a kernel of the step cannot run
        on the devices of the mesh, or there is no noise to measure.
    """
    if not isinstance(mesh, AbstractMesh):
        name = analysis.traced.name if analysis.traced else "step"
        check_runnable(name, analysis.graph, mesh.devices.flat)
    assignment = restore(analysis, plan)
    if noise is not None:
        assignment = with_waiting(assignment)
    analysis = assignment.analysis
    dealt = _replicas(analysis, plan, wait, turns)
    run = replay(analysis.program, analysis.graph, assignment, mesh, dealt)
    run = _give_name(run, analysis)
    carried = tuple(sorted(analysis.carried_arguments)) if donate else ()
    inputs: list[Any] = _in_shardings(analysis, assignment, mesh)
    outputs = _out_shardings(analysis, assignment, mesh)
    found = gradient_sums(
        assignment, plan, mesh, fallback, signals=signals, every=every
    )
    measured = None if noise is None else _noise(assignment, mesh, noise, found)
    if guard:
        outputs = [*outputs, NamedSharding(mesh, PartitionSpec())]
    made_of = functools.partial(
        PlannedStep,
        analysis,
        plan,
        mesh=mesh,
        in_shardings=inputs,
        meshes=(mesh,),
        sums=found,
        sums_of=lambda other: gradient_sums(
            assignment, other, mesh, fallback, signals=signals, every=every
        ),
        guard=guard,
    )
    if found is None and measured is None and not guard:
        function = jax.jit(
            run,
            in_shardings=inputs,
            out_shardings=outputs,
            donate_argnums=carried,
            compiler_options=_compiler_options(assignment, plan, mesh),
        )
        return made_of(function)
    spec = None if measured is None else measured.spec
    states = [x.shardings() for x in (found, spec) if x is not None]
    made = [] if found is None else [found.shardings(), None, None]
    made += [] if spec is None else [spec.shardings()]
    step = _synchronised_step(run, found, measured, assignment, guard=guard)
    beside = tuple(range(len(inputs), len(inputs) + len(states)))
    codecs = found is not None
    function = jax.jit(
        _give_name(step, analysis),
        in_shardings=[*inputs, *states],
        out_shardings=(outputs, *made) if states else outputs,
        donate_argnums=(*carried, *beside) if donate else (),
        compiler_options=_compiler_options(assignment, plan, mesh, codecs=codecs),
    )
    if gradients is None and found is not None:
        until, shardings = partial_gradients(run, found)
        gradients = jax.jit(
            until,
            in_shardings=inputs,
            out_shardings=shardings,
            compiler_options=_compiler_options(assignment, plan, mesh),
        )
    return made_of(function, gradients=gradients, noise=spec)


def _replicas(
    analysis: Analysis,
    plan: Plan,
    wait: Wait | None,
    turns: int | None,
) -> Replicas | None:
    """Returns the microbatches of each replica; None for a plan without replicas."""
    if not plan.replicas:
        return None
    loop = analysis.pytrees.loop
    assert loop is not None
    counts = tuple(r.microbatches for r in plan.replicas)
    return Replicas(loop, counts, wait, turns)


def _noise(
    assignment: Assignment, mesh: Any, noise: NoiseOptions, sums: GradientSums | None
) -> WholeNoise:
    coded = frozenset[int]() if sums is None else frozenset(sums.members)
    return whole_noise(assignment, mesh, noise, coded)


def _give_name(function: Callable[..., Any], analysis: Analysis) -> Callable[..., Any]:
    """Gives a function the step's name, which profiles and dumps then show."""
    if analysis.traced is not None:
        function.__name__ = function.__qualname__ = analysis.traced.name
    return function


def _synchronised_step(
    run: Callable[..., list[Any]],
    sums: GradientSums | None,
    noise: WholeNoise | None,
    assignment: Assignment,
    *,
    guard: bool,
) -> Callable[..., Any]:
    """Adds codecs, a measurement of noise or a guard to the function of a step.

    A step with codecs keeps its old state if a gradient is not finite. A guarded step
    keeps its old state if any result is not finite, and its last flat result says
    whether all results are finite.
    """
    analysis = assignment.analysis
    inputs = [given.value for given in analysis.graph.inputs]
    count, state = len(inputs), restored_state(analysis)
    places = {carried.result: carried for carried in state}
    early = early_state(analysis, assignment, state)

    def step(*arguments: Any) -> Any:
        flat, states = arguments[:count], list(arguments[count:])
        codecs = None if sums is None else CodecSynchroniser(sums, states.pop(0))
        meter = None if noise is None else NoiseMeter(noise, states[0], flat, codecs)
        synchroniser = codecs if meter is None else meter
        sound = Soundness(analysis, codecs) if guard else None
        looked, beside = sound or codecs, list[Any]()
        if looked is None:
            out = run(*flat, synchroniser=synchroniser, watch=meter)
        else:
            known = dict(zip(inputs, flat, strict=True))
            restorer = StateRestorer(looked, places, known, early)

            def take_made(value: int, array: Any) -> Any:
                seen = array if sound is None else sound.see_made(value, array)
                return restorer.replace_made(value, seen)

            out = run(*flat, synchroniser=synchroniser, made=take_made, watch=meter)
            out = restorer.finish(out)
        if codecs is not None:
            beside = [*codecs.finish(), codecs.taken_levels()]
        if meter is not None:
            beside.append(meter.finish())
        if sound is not None:
            out = [*out, sound.is_sound()]
            if meter is not None:
                beside[-1] = _keep_finite(sound.finite, beside[-1], arguments[-1])
        return (out, *beside) if beside else out

    return step


def _keep_finite(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new averages of noise, or the old ones if a result is not finite."""
    return jax.tree.map(lambda a, b: jax.numpy.where(finite, a, b), new, old)


def _compiler_options(
    assignment: Assignment, plan: Plan, mesh: Any, *, codecs: bool = False
) -> dict[str, CompilerValue] | None:
    """Returns the compiler options of a program; None for the defaults.

    They are those that the user gave and those that the program needs. On GPUs the
    latter keep the program within the memory of the plan. On CPUs they keep
    optimization barriers, if the program has any. By default, XLA's CPU pipeline drops
    barriers before it merges equal expressions and loops. Values that are to be
    recomputed (rematerialisation) would then stay in memory, and values that are to be
    computed once, such as a codec's payload, would be computed again in each loop that
    reads them.
    """
    platform = "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
    needed = dict[str, str]()
    if platform == "gpu":
        needed = room_options(plan.cluster.read())
    elif platform == "cpu":
        barrier = any(
            op.kind == "optimization_barrier" for op in assignment.graph.operators
        )
        again = any(
            backward and not choice.reuse
            for (_, backward), choice in assignment.copies.items()
        )
        codecs = codecs or bool(assignment.gathers)
        needed = WITH_BARRIERS if barrier or again or codecs else {}
    return joined(needed, plan.compiler_options, platform)


def _out_shardings(
    analysis: Analysis, assignment: Assignment, mesh: Any
) -> list[NamedSharding | None]:
    """Returns the sharding of each flat result.

    Carried state must be returned in the layout in which it is passed to the step; only
    this function ensures it. There are two reasons. First, a result can then be the
    argument of the next call and use the memory of the old array (donation). Second,
    `StateRestorer` can choose between the old and the new array without moving either
    of them.

    Raises:
      PlanError: the plan returns carried state in another layout.
    """
    graph = analysis.graph
    arguments = {
        result: argument for argument, result in analysis.carried_arguments.items()
    }
    found: list[NamedSharding | None] = []
    for k, value in enumerate(graph.outputs):
        layout = assignment.output(k)
        if k in arguments:
            given = graph.inputs[arguments[k]]
            home = assignment.home_layout(given.value)
            if layout not in (None, home):
                raise PlanError(
                    f"the plan's layouts do not carry '{given.path}': it comes in as "
                    f"{home} and leaves as {layout}. Make a new plan with autopar.plan."
                )
            layout, value = home, given.value
        known = layout is not None
        found.append(_sharding(mesh, layout, graph, value) if known else None)
    return found


def _struct_in_place(struct: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def _sharding(mesh: Any, layout: Any, graph: OperatorGraph, value: Any) -> Any:
    on_host = value is not None and graph.values[value].on_host
    kind = HOST_MEMORY if on_host else None
    return mesh_sharding(mesh, layout, kind)


def _in_shardings(
    analysis: Analysis, assignment: Assignment, mesh: Any
) -> list[NamedSharding]:
    graph = analysis.graph
    return [
        _sharding(mesh, assignment.home_layout(i.value), graph, i.value)
        for i in graph.inputs
    ]
