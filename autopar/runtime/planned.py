"""A planned step, and that of one stage as a compiled JAX function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar.compilers.targets import room_options
from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.compression.fallback import Fallback
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
from autopar.runtime.noise.averages import NoiseOptions, NoiseSpec
from autopar.runtime.noise.meter import NoiseMeter, WholeNoise, whole_noise
from autopar.runtime.noise.sources import with_waiting
from autopar.runtime.stages.pipeline import StagePipeline
from autopar.runtime.stages.transport import Links
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.jax_compat import lowered_without_devices
from autopar_passes.layouts import partition_spec
from autopar_passes.replay.replicas import Replicas, Wait
from autopar_passes.replay.run import replay
from autopar_passes.rules.factor_rule import KernelWork

# JAX's name of the platform that a program is lowered for, by kind of device.
_LOWERED_FOR = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


def kernels_of(graph: OperatorGraph) -> tuple[KernelWork, ...]:
    """Returns the kernels of a graph, each once."""
    return tuple(dict.fromkeys(op.kernel for op in graph.operators if op.kernel))


def lowering_platform(graph: OperatorGraph, kind: str) -> str:
    """Returns the platform for which a program is lowered without devices.

    Args:
      graph: of the step. Without kernels any platform will do, and the host is sure
        to have what its CPU needs.
      kind: of the cluster's devices: "gpu", "tpu" or "cpu".

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
      graph: of the step.
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
      analysis: the step, its batch split into the plan's microbatches; of several
        stages on the whole batch.
      plan: the plan.
      function: runs a step on the flat arguments. With ``sums`` it takes the codecs'
        state behind them, and returns the flat results, the new state, a row of
        telemetry for each gradient and the level that each took. With ``noise`` it
        takes and returns the averages of the noise scale last.
      mesh: the mesh it runs on (abstract when only lowered): of several stages all of
        their devices, in order.
      in_shardings: where each flat argument lies before a step: state at home, the
        batch on the first stage that reads it.
      meshes: that state lies on: each stage's, and that of all if one is used.
      sums: how gradients are summed; None: all by the compiler.
      sums_of: the same under a plan that differs in inputs of its programs alone.
      gradients: a function of the flat arguments to the partial gradients that are
        worth a codec, by name, of the stages in this process; None: there are none.
      noise: how the noise of gradients is measured; None: it is not.
      guard: whether the last flat result says that the step is finite.
      pipeline: the tasks of several stages; None: there is one, and ``function`` is
        its program.
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
        """Links to the other processes that have stages; None: there are none."""
        return None if self.pipeline is None else self.pipeline.links

    def with_inputs_of(self, plan: Plan) -> PlannedStep:
        """The step under a plan that differs in inputs of its programs alone.

        Args:
          plan: the other plan (`autopar.planner.codecs.adjusted.program_plan`).
        """
        return dataclasses.replace(self, plan=plan, sums=self.sums_of(plan))

    def lower(self, platform: str | None = None) -> Any:
        """Returns JAX's ``Lowered`` of the planned program.

        Args:
          platform: JAX's name of the one to lower for, on an abstract mesh; None: one
            that has the program's kernels. On a mesh of devices it is theirs.

        Raises:
          PlanError: there are several stages; it says what there is.
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
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=None if abstract else s)
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
            # The groups of replicas are all of one program.
            kind = (cluster.groups[0] if cluster.groups else cluster).device.kind
            platform = platform or lowering_platform(graph, kind)
            with lowered_without_devices():
                return traced.lower(lowering_platforms=(platform,))
        return traced.lower()

    def compile(self) -> None:
        """Compiles the programs; a call with arguments in their places finds them.

        Shardings are part of what JAX finds compiled code by, so the structs that
        are lowered carry them.
        """
        if self.pipeline is None:
            compile_lowered(self.lower())
        else:
            self.pipeline.compile()

    def settle_results(
        self, placed: Sequence[Any], flat: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """The flat results of a guarded step, and whether it was finite.

        A program of one stage has restored its state and says so. What stages return
        is looked at here, by each process that has a part of it.

        Args:
          placed: its flat arguments.
          flat: what it returned.
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
      gradients: that of a step that differs in the codecs alone.
      fallback: the codecs of a step in which the plan's send too little.
      noise: how the noise of gradients is measured; None: it is not.
      signals: whether the signal of what codecs send is measured.
      every: the telemetry of one step in so many is measured.
      guard: whether a step that is not finite leaves its state as it was, and says so.
      wait: of a plan with replicas, what waits in each turn of one
        (`autopar_passes.replay.replicas.Replicas`), to simulate slower devices.
      turns: of a plan with replicas, how many turns each has, for audits alone; None:
        as many as the plan says.

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
    dealt = _replicas(analysis, plan, noise, wait, turns)
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
    noise: NoiseOptions | None,
    wait: Wait | None,
    turns: int | None,
) -> Replicas | None:
    """How the plan deals microbatches out; None: it has no replicas.

    Raises:
      PlanError: what is asked for is not carried out with replicas.
    """
    if not plan.replicas:
        return None
    if noise is not None:
        raise PlanError(
            "noise_scale: the replicas of this plan have unequal numbers of "
            "microbatches, whose gradients are not compared. Leave noise_scale out."
        )
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
    """Gives a function the step's name: profiles and dumps show it for the module."""
    if analysis.traced is not None:
        function.__name__ = function.__qualname__ = analysis.traced.name
    return function


def _synchronised_step(
    run: Callable[..., list[Any]],
    sums: GradientSums | None,
    noise: WholeNoise | None,
    assignment: Assignment,
    *,
    guard: bool = False,
) -> Callable[..., Any]:
    """A step with codecs, or whose noise is measured, or that is guarded.

    With codecs the carried state is restored when a gradient is not finite, with a
    guard also when a result is not; it is said in the last of the flat results.
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
    """The new averages of noise, or the old ones behind a step that is not finite."""
    return jax.tree.map(lambda a, b: jax.numpy.where(finite, a, b), new, old)


def _compiler_options(
    assignment: Assignment, plan: Plan, mesh: Any, *, codecs: bool = False
) -> dict[str, str] | None:
    """Options of a program: room on GPUs, and on CPUs its barriers, where they matter.

    XLA's CPU pipeline drops optimization barriers before it merges equal
    expressions and loops: what was to be computed again is kept instead, and what
    was to be computed once, such as what a codec is to send, is computed again in
    each loop that reads it.
    """
    platform = "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
    if platform == "gpu":
        return room_options(plan.cluster.read()) or None
    if platform != "cpu":
        return None
    barrier = any(
        op.kind == "optimization_barrier" for op in assignment.graph.operators
    )
    again = any(
        backward and not choice.reuse
        for (_, backward), choice in assignment.copies.items()
    )
    return WITH_BARRIERS if barrier or again or codecs else None


def _out_shardings(
    analysis: Analysis, assignment: Assignment, mesh: Any
) -> list[NamedSharding | None]:
    """Sharding of each flat result: carried state leaves in the layout it came in.

    Here alone this is decided and checked. It lets a result be the next call's
    argument as it is, in the memory of the old one (donation, `timing`), and old and
    new be chosen between without moving either (`StateRestorer`). A stage that hands
    its state to another will have to relax it here.

    Raises:
      PlanError: a plan's layouts say otherwise.
    """
    graph = analysis.graph
    arguments = {
        result: argument for argument, result in analysis.carried_arguments.items()
    }
    found: list[NamedSharding | None] = []
    for k in range(len(graph.outputs)):
        layout = assignment.output(k)
        if k in arguments:
            given = graph.inputs[arguments[k]]
            home = assignment.home_layout(given.value)
            if layout not in (None, home):
                raise PlanError(
                    f"the plan's layouts do not carry '{given.path}': it comes in as "
                    f"{home} and leaves as {layout}. Make a new plan with autopar.plan."
                )
            layout = home
        found.append(_sharding(mesh, layout))
    return found


def _struct_in_place(struct: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def _sharding(mesh: Any, layout: Any) -> NamedSharding | None:
    if layout is None:
        return None
    return NamedSharding(mesh, partition_spec(mesh, layout))


def _in_shardings(
    analysis: Analysis, assignment: Assignment, mesh: Any
) -> list[NamedSharding]:
    return [
        NamedSharding(mesh, partition_spec(mesh, assignment.home_layout(i.value)))
        for i in analysis.graph.inputs
    ]
