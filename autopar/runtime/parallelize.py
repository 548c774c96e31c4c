"""The decorator: a train step that plans itself on its first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from autopar.cluster import Cluster
from autopar.compression.fallback import LEAST_GAIN, Fallback
from autopar.compression.policies.policy import GradientReport, Policy
from autopar.errors import PlanError
from autopar.planner.edited import carried_out
from autopar.planner.hints import logical_pins
from autopar.planner.plan import SOLVER_SECONDS, plan_analysis
from autopar.planner.record import check_plan
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, placement
from autopar.runtime.gradients.codec_run import CodecRun, recoded
from autopar.runtime.planned import PlannedStep, device_mesh, planned_step
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.trace import is_graph_node, pure_arguments


def parallelize(
    step: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    devices: Sequence[Any] | None = None,
    donate: bool = True,
    policy: Policy | None = None,
    fallback: str | Sequence[str] = (),
    least_gain: float = LEAST_GAIN,
    **options: Any,
) -> Any:
    """Decorates a train step so that it runs under the plan found for it.

    The step keeps its signature. State that comes back with the structure of
    an argument is carried, and consumed by the call (``donate``). Batches may be
    numpy or JAX arrays; under ``jax.distributed`` each process passes its part.

    Args:
      step: the train step; absent when used as ``@parallelize(...)``.
      cluster: what to plan for; default: the devices of this process.
      plan: a plan made before, instead of planning on the first call; what was
        edited in it is carried out.
      devices: the devices to run on; default: the first of ``jax.devices()``.
      donate: whether a call consumes the carried state.
      policy: changes the codecs of gradients while training; see
        `autopar.compression.policies.policy`. Needs ``compression=``.
      fallback: codecs, in the order in which they are tried in a step in which
        those of the plan send too little; the last one always sends. Needs
        ``compression=``.
      least_gain: of the squared norm of what is to be sent, the part that must be.
      **options: hints and limits, as for `autopar.plan`.
    """
    if plan is not None and cluster is not None:
        raise PlanError("parallelize: give cluster= or plan=, not both.")
    known = {*inspect.signature(plan_analysis).parameters, "logical_axis_rules"}
    if unknown := sorted(set(options) - set(known) | {"step", "args"} & set(options)):
        raise TypeError(f"parallelize: unknown options {', '.join(unknown)}.")
    ignored = {"compression", "error_budget", "layouts"} & set(options)
    if plan is not None and ignored:
        raise PlanError(
            f"parallelize: {', '.join(f'{name}=' for name in sorted(ignored))} has no "
            "effect with plan=, which has its own codecs. For other codecs on its "
            "layouts, leave plan= out and give layouts=plan."
        )

    compression = None if plan else options.get("compression", "none")
    safer = _fallback(fallback, least_gain, compression)

    def decorate(function: Callable[..., Any]) -> ParallelStep:
        return ParallelStep(
            function,
            cluster=cluster,
            plan=plan,
            devices=devices,
            donate=donate,
            policy=policy,
            fallback=safer,
            options=options,
        )

    return decorate if step is None else decorate(step)


class ParallelStep:
    """A train step that runs under a plan; see `parallelize`."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        cluster: Cluster | None,
        plan: Plan | None,
        devices: Sequence[Any] | None,
        donate: bool,
        policy: Policy | None,
        fallback: Fallback | None,
        options: dict[str, Any],
    ) -> None:
        """See `parallelize`, which makes these."""
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        functools.update_wrapper(self, step)
        self._step = step
        self._cluster = cluster
        self._given = plan
        self._devices = devices
        self._donate = donate
        self._fallback = fallback
        self._options = options
        self._analyses: dict[Any, Analysis] = {}
        self._hints: dict[Any, dict[str, Any]] = {}
        self._batches = arguments.BatchArguments(step)
        self._planned: dict[Any, PlannedStep] = {}
        # By cluster: going back to one finds its plan and its compiled program.
        self._known: dict[str, dict[Any, PlannedStep]] = {}
        self._current: PlannedStep | None = None
        self._codecs = CodecRun(policy)
        # By step, layouts and codecs: a policy that goes back finds its compiled
        # program. The program of the gradients stands for the layouts.
        self._variants: dict[tuple[int, int, Any], PlannedStep] = {}

    @property
    def plan(self) -> Plan:
        """The plan in use.

        Raises:
          PlanError: no plan has been made yet.
        """
        if self._current is not None:
            return self._current.plan
        if self._given is not None:
            return self._given
        raise PlanError(
            f"{self.__name__}: no plan yet: it is made on the first call, or give "
            "init(..., batch=...) an example batch."
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""
        if self._cluster is None:
            count = None if self._devices is None else len(self._devices)
            self._cluster = Cluster.local(count)
        return self._cluster

    def init(
        self, create_state: Callable[..., Any], *args: Any, batch: Any = None
    ) -> Any:
        """Creates the state directly in its shards; no device holds all of it.

        With an example ``batch`` (or a plan given to `parallelize`) the state
        lies as the plan wants it. Without, it is split evenly and moved on the
        first call. Codecs start anew with it: residuals of earlier steps are not
        sent to a new state.

        Args:
          create_state: makes the state (for NNX: the model and optimizer).
          args: its arguments.
          batch: an example batch, arrays or ``ShapeDtypeStruct``s.
        """
        abstract = _abstract(create_state, args)
        if batch is not None:
            self.prepare(*_splat(abstract), batch)
        pure = _pure_state(abstract)
        shardings = self._state_shardings(jax.tree.leaves(pure), batch is not None)
        made = placement.create(_leaves_of(create_state), args, shardings)
        self._codecs.start_anew()
        return _rebuilt(abstract, jax.tree.unflatten(jax.tree.structure(pure), made))

    def _state_shardings(self, leaves: Sequence[Any], planned: bool) -> list[Any]:
        if planned and self._current is not None:
            return self._current.in_shardings[: len(leaves)]
        if self._given is not None:
            arguments.check_shapes(self.__name__, self._given, leaves)
            mesh = device_mesh(self._given, self._devices)
            specs = list(self._given.inputs.values())[: len(leaves)]
            return [
                jax.sharding.NamedSharding(
                    mesh, jax.sharding.PartitionSpec(*(axes or None for axes in spec))
                )
                for spec in specs
            ]
        devices = self._devices or jax.devices()[: self.cluster.num_devices]
        mesh = jax.make_mesh(
            (len(devices),),
            ("all",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=devices,
        )
        return [placement.even_sharding(x.shape, mesh) for x in leaves]

    @property
    def compression_state(self) -> Any:
        """The state of the codecs: residuals and what they learned; None: none yet.

        Save it with the train state. After a restart, assign what was saved; the
        next call places it for the plan in use.
        """
        return self._codecs.state

    @compression_state.setter
    def compression_state(self, state: Any) -> None:
        self._codecs.restore(state)

    @property
    def telemetry(self) -> dict[str, GradientReport]:
        """What the last step says of each compressed gradient, by parameter.

        Raises:
          PlanError: no step with compressed gradients has run.
        """
        return self._codecs.report()

    def recode(self, codecs: Mapping[str, str]) -> None:
        """Sends gradients by other codecs from the next call on.

        Args:
          codecs: name of a parameter -> codec as text. Sets of codecs that were
            used before are not compiled again.

        Raises:
          PlanError: a parameter has no compressed gradient.
        """
        if self._current is None:
            raise PlanError(f"{self.__name__}: recode needs a step that was planned.")
        current = self._current
        plan = recoded(current.plan, codecs)
        key = next(k for k, p in self._planned.items() if p is current)
        layouts = (id(current.analysis), id(current.gradients))
        self._variants.setdefault((*layouts, _codecs_of(current.plan)), current)
        variant = (*layouts, _codecs_of(plan))
        if variant not in self._variants:
            self._variants[variant] = planned_step(
                current.analysis,
                plan,
                current.mesh,
                donate=self._donate,
                gradients=current.gradients,
                fallback=self._fallback,
            )
        self._planned[key] = self._current = self._variants[variant]

    def prepare(self, *args: Any) -> PlannedStep:
        """Plans for these arguments without running; arrays or structs."""
        structs = self._batches.structs(args)
        key = arguments.signature(structs)
        if key not in self._planned:
            if key not in self._analyses:
                self._analyses[key] = analyse(self._step, structs)
                self._hints[key] = self._resolved(structs)
            self._planned[key] = self._make(key)
        self._current = self._planned[key]
        return self._current

    def _resolved(self, structs: Sequence[Any]) -> dict[str, Any]:
        """The options of `plan_analysis`, with logical axes turned into pins."""
        options = dict(self._options)
        rules = options.pop("logical_axis_rules", None) or ()
        named = logical_pins(self._step, structs, rules)
        options["pins"] = {**named, **(options.get("pins") or {})}
        return options

    def _make(self, key: Any) -> PlannedStep:
        analysis = self._analyses[key]
        plan = self._given
        if plan is None:
            cluster, hints = self.cluster, self._hints[key]
            plan = agreement.agree(lambda: plan_analysis(analysis, cluster, **hints))
        else:
            plan = carried_out(analysis, plan, seconds=SOLVER_SECONDS)
        agreement.check_same(plan, analysis.fingerprint)
        check_plan(analysis, plan)
        mesh = device_mesh(plan, self._devices)
        return planned_step(
            analysis, plan, mesh, donate=self._donate, fallback=self._fallback
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; see `parallelize`. Under a JAX transform, the plain step."""
        args = arguments.positional(self._step, args, kwargs)
        leaves = jax.tree.leaves(pure_arguments(args))
        if any(isinstance(x, Tracer) for x in leaves):
            return self._step(*args)
        planned = self.prepare(*args)
        placed = [
            placement.place_batch(x, _value_shape(planned, k), s)
            if given.role is InputRole.BATCH
            else placement.place(x, s)
            for k, (x, s, given) in enumerate(
                zip(
                    leaves,
                    planned.in_shardings,
                    planned.analysis.graph.inputs,
                    strict=True,
                )
            )
        ]
        if self._donate:
            placement.separate(placed, planned.analysis.carried)
        if planned.synchronisation is None:
            flat = planned.function(*placed)
        else:
            flat = self._codecs.run(planned, placed)
        if self._donate:
            placement.consume(leaves, placed, planned.analysis.carried)
        if planned.synchronisation is not None and (wish := self._codecs.advise()):
            self.recode(wish)
        out = jax.tree.unflatten(planned.analysis.pytrees.out_tree, flat)
        mutated = planned.analysis.pytrees.mutated
        if not mutated:
            return out
        state, result = out
        nnx.update(tuple(args[i] for i in mutated), state)
        return result

    def lower(self, *args: Any) -> Any:
        """Returns JAX's ``Lowered`` of the planned program for these arguments."""
        return self.prepare(*args).lower()

    def replan(self, cluster: Cluster, state: Any) -> Any:
        """Plans for another cluster, moves the state there and returns it.

        The next call of the step runs under the new plan.

        Args:
          cluster: the cluster to move to, such as ``Cluster.local(devices=4)``.
          state: the carried state: one pytree, or a tuple of the leading
            arguments (NNX: the model and optimizer, updated in place).

        Raises:
          PlanError: the step has not been planned before.
        """
        if self._current is None:
            raise PlanError(
                f"{self.__name__}: replan needs a step that ran, or "
                "init(..., batch=...)."
            )
        if self._given is None and self._devices is None:
            self._known.setdefault(self.cluster.fingerprint(), self._planned)
        analysis = self._current.analysis
        key = next(k for k, a in self._analyses.items() if a is analysis)
        self._cluster, self._given, self._devices = cluster, None, None
        self._planned = self._known.setdefault(cluster.fingerprint(), {})
        if key not in self._planned:
            self._planned[key] = self._make(key)
        self._current = self._planned[key]
        return self._move(state)

    def _move(self, state: Any) -> Any:
        assert self._current is not None
        args = _splat(state)
        leaves, tree = jax.tree.flatten(pure_arguments(args))
        arguments.check_leading(self.__name__, self._current.analysis, leaves)
        shardings = self._current.in_shardings[: len(leaves)]
        moved = [placement.place(x, s) for x, s in zip(leaves, shardings, strict=True)]
        new = list(jax.tree.unflatten(tree, moved))
        if nodes := tuple(a for a in args if is_graph_node(a)):
            nnx.update(nodes, new.pop(0))
        out = tuple(a if is_graph_node(a) else new.pop(0) for a in args)
        return out if type(state) is tuple else out[0]


def _fallback(
    codecs: str | Sequence[str], least_gain: float, compression: str | None
) -> Fallback | None:
    """What was asked for, or None."""
    if not codecs:
        return None
    if compression == "none":
        raise PlanError(
            "parallelize: fallback= has no effect without codecs; give compression= "
            "as well."
        )
    try:
        return Fallback(codecs, least_gain)
    except ValueError as error:
        raise PlanError(f"parallelize: fallback={codecs!r}: {error}") from error


def _codecs_of(plan: Plan) -> tuple[str, ...]:
    return tuple(g.codec for g in plan.gradients)


def _splat(state: Any) -> tuple[Any, ...]:
    """A state that is a plain tuple holds the step's leading arguments."""
    return state if type(state) is tuple else (state,)


def _value_shape(planned: PlannedStep, position: int) -> tuple[int, ...]:
    graph = planned.analysis.graph
    return graph.values[graph.inputs[position].value].shape


def _abstract(create_state: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The shapes of the state; NNX objects stay objects, with abstract arrays."""
    return nnx.eval_shape(create_state, *args)


def _pure_state(state: Any) -> Any:
    """A state as a pytree of arrays; that of NNX objects taken out of them."""
    return pure_arguments(_splat(state)) if is_graph_node(state) else state


def _leaves_of(create_state: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Creates the arrays of a state alone.

    What a state holds besides (such as ``apply_fn``, bound to a module that is
    made anew each time) may not compare equal from one call to the next.
    """
    return lambda *args: jax.tree.leaves(_pure_state(create_state(*args)))


def _rebuilt(abstract: Any, pure: Any) -> Any:
    """Puts arrays into the state they were planned for: objects, static parts."""
    if not is_graph_node(abstract):
        return pure
    nodes = nnx.merge(nnx.graphdef(_splat(abstract)), pure[0])
    return nodes if type(abstract) is tuple else nodes[0]
