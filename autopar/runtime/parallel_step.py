"""A train step that runs under a plan: joins planner, programs, codecs and world."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import jax
from jax.core import Tracer

from autopar import progress
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.cache import PlanCache
from autopar.planner.edited import with_status
from autopar.planner.options import PlanOptions
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, creation, placement
from autopar.runtime.arguments import LastBatch
from autopar.runtime.codec_run import CodecRun, HasNoise, NoiseRun, Telemetry
from autopar.runtime.comparing import (
    Compared,
    Comparer,
    is_costly,
    kinds_of,
    loss_among,
    milder_options,
    milder_text,
    with_codec,
)
from autopar.runtime.evaluation import Evaluation
from autopar.runtime.gradients.recoding import CodecChange
from autopar.runtime.planned import PlannedStep
from autopar.runtime.preparation import Made, Preparation, Running, Setting, moved_state
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.repeated_calls import RepeatedCall, repeated_call
from autopar.runtime.state_mover import name_arrays
from autopar.runtime.step_planner import ANALYSES, Analysed, StepPlanner
from autopar.runtime.world import World
from autopar_errors import warn_user
from autopar_passes.jax_meshes import without_mesh
from autopar_passes.program.calls import Parameters, StepCall
from autopar_passes.program.static_leaves import is_object, updating
from autopar_passes.program.trace import opened_within, step_name


def method_of(step: Any, instance: Any) -> Any:
    """Returns a step as a method of an object.

    A module or another pytree of arrays becomes the first argument of the step, and is
    state if the step returns it. Any other object is static: when the step is traced,
    the attributes that it reads become constants of the program. Each object has its
    own plans.

    Args:
      step: the `ParallelStep` of the class.
      instance: the object.

    Raises:
      PlanError: the object has no ``__dict__`` to keep its step in.
    """
    if is_object(instance) or jax.tree.leaves(instance) != [instance]:
        return functools.partial(step, instance)
    name, made = step.__name__, _bind_step(step, instance)
    try:
        # Python finds an attribute of the object before a descriptor without
        # ``__set__``.
        vars(instance)[name] = made
    except TypeError as error:
        kind = type(instance).__name__
        raise PlanError(
            f"{name}: its object, a {kind}, has no __dict__ to keep the planned step "
            "in. Plan a function instead: autopar.parallelize(functools.partial("
            f"{kind}.{name}, obj)), with the undecorated method."
        ) from error
    return made


def _bind_step(step: Any, instance: Any) -> Any:
    """Returns the step of one object, with its own plans."""
    bound, known = functools.partial(step._step, instance), step.parameters
    return type(step)(
        bound,
        setting=step._setting,
        options=step.preparation.planner.options,
        store=step._store.empty(),
        codecs=type(step._codecs)(step._codecs.policy),
        world=step._world,
        # The object may be named static, and is no argument of the bound step.
        parameters=dataclasses.replace(
            Parameters.of(bound, roles=known.roles), static=known.static
        ),
        fewer=step._last_batch,
        cache=step._cache,
    )


P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


class ParallelStep(HasNoise, Generic[P, R]):
    """A train step that runs under a plan; see `autopar.parallelize`."""

    def __init__(
        self,
        step: Callable[P, R],
        *,
        setting: Setting,
        options: PlanOptions,
        store: ProgramStore,
        codecs: CodecRun,
        world: World | None = None,
        parameters: Parameters | None = None,
        fewer: LastBatch = "run",
        cache: PlanCache | None = None,
        comparer: Comparer | None = None,
    ) -> None:
        """See `autopar.parallelize`, which creates parallel steps.

        Args:
          step: the train step.
          setting: the cluster, devices and plan of the step.
          options: hints and limits of planning.
          store: keeps the compiled programs of the step.
          codecs: runs the steps whose gradients have codecs.
          world: the processes and devices; None for JAX's, read on the first use.
          parameters: how the step takes its arguments; None for the step's signature.
          fewer: what to do with a batch that has fewer rows than planned.
          cache: the plans on disk.
          comparer: compares training with codecs with exact training.
        """
        functools.update_wrapper(self, step)
        self.__name__: str = step_name(step)
        self._step = step
        self.parameters = parameters or Parameters.of(step)
        self._last_batch: LastBatch = fewer
        self._world = world
        self._setting = setting
        self._cache = cache
        self._store = store
        self._preparation = Preparation(
            StepPlanner(
                step,
                options,
                cache=cache,
                one_stage=self._one_stage,
                may_idle=lambda: self.world.process_count == 1,
                may_pad=store.noise is None,
            ),
            store,
            lambda: self.world,
            lambda: self.cluster,
            lambda: self._codecs.errors,
        )
        agreement.announce_end()
        self._codecs, self._comparer = codecs, comparer
        self._noise, self.finite = NoiseRun(), cast("Any", None)
        stated = {} if setting.plan is None else setting.plan.written_shapes
        self._batches = arguments.BatchArguments(step, ANALYSES, stated)
        self._current: Running | None = None
        self._repeated: RepeatedCall | None = None

    def _one_stage(self) -> str:
        """Returns why the planner must not try pipeline stages unless requested.

        The result is '' if the planner may try pipeline stages.
        """
        store = self._store
        reasons = {
            "several processes run it": self.world.process_count > 1,
            "noise_scale= is measured": store.noise is not None,
            "fallback= is given": store.fallback is not None,
            "policy= is given": self._codecs.policy is not None,
        }
        why = next((why for why, holds in reasons.items() if holds), "")
        return f"{why}; stages='auto' also tries several stages" if why else ""

    @property
    def world(self) -> World:
        """The processes and devices that the step may use."""
        if self._world is None or self._world.is_left:
            self._world = World.current()
            agreement.announce_end()
        return self._world

    @property
    def plan(self) -> Plan:
        """The plan in use.

        Raises:
          PlanError: no plan has been made yet.
        """
        if self._current is None and self._setting.plan is not None:
            return self._setting.plan
        return self._running().plan

    @property
    def cluster(self) -> Cluster:
        """The cluster of the plan."""
        if self._setting.cluster is None:
            count = len(self._setting.devices or self.world.devices)
            local = Cluster.local(count)
            self._setting = dataclasses.replace(self._setting, cluster=local)
            return local
        return self._setting.cluster

    @without_mesh()
    def init(
        self,
        create_state: Callable[..., Any],
        *args: Any,
        batch: Any = None,
        others: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> Any:
        """Creates the state directly in its shards; no device holds the whole state.

        With an example ``batch`` (or a plan given to `autopar.parallelize`) the state
        gets the shardings of the plan. Without a batch or plan, the state is split
        evenly, and the first call moves it. The state of codecs and the averages of the
        noise scale start anew: residuals of earlier steps are not added to gradients of
        the new state.

        Args:
          create_state: makes the state (for NNX: the model and optimizer). A plain
            tuple holds several leading arguments of the step.
          args: the arguments of ``create_state``.
          batch: an example batch, arrays or ``ShapeDtypeStruct``s, for a step whose
            only argument after the state is the batch.
          others: for any other step: all arguments after the state, as a sequence in
            the order of the step's parameters or as a mapping by name.

        Raises:
          PlanError: both ``batch`` and ``others`` are given, or several processes would
            make different states.
        """
        creation.check_creation(self.__name__, create_state, batch, others)
        with agreement.tell_errors(self.world, "creating the state"):
            shapes = creation.state_shapes(create_state, args)
        agreement.check_same_creation(self.world, shapes.leaves, args)
        self._preparation.planner.hold_types(shapes.structs)
        rest = creation.arguments_after(batch, others)
        creation.check_tuple(self.__name__, self.parameters.signature, shapes, rest)
        if rest is not None:
            self.prepare(*shapes.arguments(), *rest[0], **rest[1])
        with agreement.tell_errors(self.world, "creating the state"):
            if rest is not None and self._current is not None:
                shardings = self._current.planned.in_shardings[: len(shapes.structs)]
            else:
                shardings = self._preparation.state_shardings(
                    self.__name__, shapes.structs, self._setting
                )
            made = placement.create(shapes.leaves, args, shardings)
        self._codecs.start_anew()
        self._noise.start_anew()
        return shapes.state(placement.given_back(made, placement.home_of(args)))

    @property
    def compression_state(self) -> Any:
        """The state of the codecs, such as residuals of error feedback.

        None before the first step.

        Save this value with the train state. After a restart, assign it again. The next
        call then places it on the devices of the plan in use, and sends gradients by
        the codecs that `recode` or a policy had chosen before.
        """
        current = self._current
        return self._codecs.copy_state(
            None if current is None else current.planned.plan
        )

    @compression_state.setter
    def compression_state(self, state: Any) -> None:
        self._codecs.restore(state, held=False)

    def finish_comparison(self) -> None:
        """Compares the whole arrays of the last calls; all processes must call it.

        Raises:
          PlanError: arrays that each process passes whole differ.
        """
        self._preparation.finish_comparison()

    def hold_compression_state(self, state: Any) -> None:
        """Restores a saved codec state.

        If the current plan has no codecs, the state is kept for a later plan.
        """
        held = self._current is not None and self._current.planned.sums is None
        self._codecs.restore(state, held=held)

    @property
    def telemetry(self) -> Telemetry:
        """Telemetry of the last step for each compressed gradient, by parameter.

        If the plan has no codec, the telemetry is empty and its ``reason`` says so.

        Raises:
          PlanError: no step has run yet.
        """
        return self._codecs.report(self._current and self._current.planned)

    @property
    def codec_changes(self) -> tuple[CodecChange, ...]:
        """The latest changes of codecs that the policy requested, the newest last.

        Each change says whether it was adopted or postponed, and why.
        """
        return self._codecs.adoption.changes

    @without_mesh()
    def recode(
        self, codecs: Mapping[str, str] | Literal["auto"], *, often: bool = False
    ) -> None:
        """Sends gradients by other codecs from the next call on.

        Args:
          codecs: name of a parameter -> codec as text. Sets of codecs that were
            used before are not compiled again while their programs are kept. With
            ``auto`` in place of a mapping, the planner chooses codecs anew for the
            layouts in use. It uses the errors measured in training, as far as these
            exist.
          often: whether the parameters of the codecs will change again. Parameters that
            can be inputs of the program then become inputs, for up to 41 % more bytes
            (page 'Gradient compression' of the documentation).

        Raises:
          PlanError: a parameter has no compressed gradient, a codec is not known, or a
            codec cannot send the gradient of its parameter.
        """
        if self._current is None:
            raise PlanError(f"{self.__name__}: recode needs a step that was planned.")
        recoding, plan = self._codecs.recoding, self._current.planned.plan
        if codecs == "auto":
            analysed = self._current.analysed
            made = self._preparation.recode_plan(analysed, self._setting, plan)
            self._use(recoding.plan_as_chosen(plan, made, often=often))
        else:
            self._use(recoding.change_codecs(plan, codecs, often=often))

    def _use(self, plan: Plan) -> PlannedStep:
        """Uses a plan that differs from the current plan only in its codecs."""
        assert self._current is not None
        analysed, current = self._current.analysed, self._current.planned
        if plan is current.plan:
            return current
        planned = self._preparation.coded_step(analysed, plan, self._setting, current)
        self._codecs.adoption.withdrawn()
        self._preparation.remember(analysed, self._setting, plan)
        self._current = Running(analysed, planned, full=self._current.full)
        return planned

    @without_mesh()
    def prepare(self, *args: Any, **kwargs: Any) -> PlannedStep:
        """Plans for these arguments (arrays or structs) without running the step."""
        with agreement.tell_errors(self.world, "reading the arguments"), updating():
            call = opened_within(self.parameters, args, kwargs)
        return self._prepare(call)

    def _prepare(self, call: StepCall) -> PlannedStep:
        """Plans for the arguments of a call."""
        structs = self._batches.structs(call, self.world)
        if self._current is None or not self._current.analysed.fits(structs):
            with progress.show_progress():
                beside, setting = self._beside(call), self._setting
                analysed = self._preparation.analyse(structs)
                near = None if beside is None else beside.plan
                plan = self._preparation.plan(analysed, setting, near)
                if self._current is not None:
                    used = self._current.planned.plan
                    plan = self._codecs.recoding.plan_as_used(plan, used)
                planned = self._preparation.program(analysed, plan, setting)
                self._preparation.remember(analysed, setting, plan)
                self._current = Running(analysed, planned, full=beside)
        return self._current.planned

    def _beside(self, call: StepCall) -> PlannedStep | None:
        """Returns the planned step for a full batch if this call has fewer rows.

        Returns None if the call has a full batch. The caller then plans this call such
        that the state keeps its shardings of a full batch.
        """
        current = self._current
        if current is None:
            return None
        full, count = current.of_full_batch, self.world.process_count
        return full if arguments.fewer_rows(call, full, count) else None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step; see `autopar.parallelize`.

        Under a JAX transform, such as ``jax.jit`` or ``jax.eval_shape``, this calls the
        undecorated step.
        """
        if (found := self._repeats(args, kwargs)) is not None:
            return self._again(*found)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._step(*args, **kwargs)
        with without_mesh(), updating():
            with agreement.tell_errors(self.world, "reading the arguments"):
                call = opened_within(self.parameters, args, kwargs)
                arguments.check_alive(self.__name__, call)
            return self._run(call, args, kwargs)

    def _repeats(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RepeatedCall, list[Any], list[Any]] | None:
        """Returns the last call, and the arrays of this call as given and as placed.

        Returns None if these arguments differ from those of the last call in more than
        the values of arrays.
        """
        known, saved = self._repeated, self._codecs.has_saved
        if known is None or known.running is not self._current or saved:
            return None
        found = known.place_call(args, kwargs)
        return None if found is None else (known, *found)

    def _again(self, known: RepeatedCall, given: list[Any], placed: list[Any]) -> Any:
        """Runs one step on arguments like those of the last call."""
        planned = known.running.planned
        flat = self._issue_program(planned, placed)
        known.consume(given, placed, flat)
        self._follow_up(planned, flat)
        return planned.analysis.pytrees.result.return_value(flat)

    def _run(
        self, call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one step on the arrays of a call."""
        if self._current is not None and self._last_batch != "run":
            count, running = self.world.process_count, self._current.of_full_batch
            call = arguments.fit_rows(call, running, self._last_batch, count)
        planned = self._prepare(call)
        if planned.sums is None:
            self._codecs.check_unused(planned.plan)
        else:
            planned = self._use(self._codecs.resume_plan(planned.plan))
        assert self._current is not None
        first = not self._current.ready
        if first and self._comparer is not None:
            self._loss_in(_result_structs(planned))  # before the state is consumed
        placed = self._preparation.place_arguments(planned, call.arrays, first=first)
        self._make_ready()
        running, carried = self._current, self._store.consumed_arguments(planned)
        placement.separate(call.arrays, placed, carried)
        with self._preparation.compiling(planned, self.__name__):
            flat = self._issue_program(planned, placed)
        placement.consume(call.arrays, placed, carried, flat)
        home = placement.home_of(call.arrays)
        if home is None and planned.links is None:
            place = self._preparation.placing(planned)
            self._repeated = repeated_call(
                running, call, args, kwargs, placed, flat, carried, place
            )
        self._follow_up(planned, flat)
        flat = placement.given_back(
            flat, home, frozenset(planned.analysis.carried_arguments.values())
        )
        return planned.analysis.pytrees.result.return_value(flat)

    def _issue_program(self, planned: PlannedStep, placed: list[Any]) -> list[Any]:
        """Runs a program on placed arrays; returns its flat results."""
        if planned.sums is not None:
            self._codecs.prepare(planned, placed, self.world)
        if self._comparer is not None:
            full = self.running.full is None
            self._comparer.begin_step(
                planned, placed, self._edited, self._loss_of, full=full
            )
        flat = self._noise.run(planned, placed, self._codecs)
        if self._store.guard:
            flat, self.finite = planned.settle_results(placed, flat)
        return flat

    def _follow_up(self, planned: PlannedStep, flat: Sequence[Any]) -> None:
        """Changes codecs from the next step on, by the policy or by a comparison.

        Args:
          planned: the step that has just run.
          flat: its flat results.
        """
        if self._comparer is not None:
            result = self._comparer.end_step(planned, flat, self._loss_of)
            if result is not None:
                self._judge(result)
        if planned.sums is not None and (wish := self._codecs.advise(self.world)):
            self._follow(wish)

    def _loss_of(self, flat: Sequence[Any]) -> float:
        """The loss among the flat results of a step, as a number."""
        return float(self._loss_in(flat))

    def _loss_in(self, flat: Sequence[Any]) -> Any:
        """The loss among the flat results of a step, or among their structs.

        A constant is no loss.

        Raises:
          PlanError: no result is surely the loss.
        """
        analysis = self.running.planned.analysis
        left_out = set(analysis.carried_arguments.values())
        left_out |= {k for k, v in enumerate(analysis.graph.outputs) if v is None}
        paths = enumerate(analysis.output_paths)
        loss = loss_among({p: flat[k] for k, p in paths if k not in left_out})
        if loss is None:
            raise PlanError(
                f"{self.__name__}: comparison= does not know which result is the loss. "
                "Return one floating-point scalar, or one with the name 'loss', as in "
                "{'loss': ...}."
            )
        return loss

    def _carried_out(self, plan: Plan) -> Plan:
        """Returns an edited plan, carried out for the last call."""
        setting = dataclasses.replace(self._setting, plan=plan)
        made = self._preparation.plan(self.running.analysed, setting)
        return with_status(made, "codecs changed by a comparison")

    def _edited(self, plan: Plan) -> PlannedStep:
        """Returns the compiled program of an edited plan for the last call."""
        made = self._carried_out(plan)
        planned = self._preparation.program(
            self.running.analysed, made, dataclasses.replace(self._setting, plan=made)
        )
        agreement.run_together(
            self.world, "compiling", lambda: self._preparation.compile(planned)
        )
        return planned

    def _judge(self, result: Compared) -> None:
        """Makes the codecs of one kind milder if a comparison says so."""
        assert self._comparer is not None
        plan = self.running.planned.plan
        kind = kinds_of(plan)[0]
        text = milder_text(plan, kind)
        milder = with_codec(plan, kind, text)

        def saved() -> float:
            milder_s = self._carried_out(milder).predicted.step_s
            return 1.0 - plan.predicted.step_s / milder_s

        if not is_costly(result, self._comparer.options.most, saved):
            self._comparer.end(result, "")
            return
        known = math.isfinite(result.cost)
        part = f"{100 * result.cost:.0f} % of the " if known else ""
        warn_user(
            f"{self.__name__}: codecs cost {part}progress: the loss is "
            f"{result.loss:.4g}, and {result.exact_loss:.4g} with exact values "
            f"(standard error {result.error:.2g}). From now on, {kind} are sent as "
            f"'{text}'."
        )
        self._withdraw(milder, kind, text)
        self._comparer.end(result, kind)

    def _withdraw(self, milder: Plan, kind: str, text: str) -> None:
        """Uses milder codecs of a kind from the next step on, also in later plans."""
        running, planned = self.running, self._edited(milder)
        setting = self._setting
        if setting.plan is not None:
            setting = dataclasses.replace(setting, plan=planned.plan)
        else:
            asked = setting.codecs or self._preparation.planner.options
            asked = milder_options(asked, kind, text)
            setting = dataclasses.replace(setting, codecs=asked)
        self._setting = setting
        self._preparation.remember(running.analysed, setting, planned.plan)
        self._current = Running(running.analysed, planned)

    @property
    def comparisons(self) -> tuple[Compared, ...]:
        """The results of comparisons with exact training, the newest last."""
        return () if self._comparer is None else tuple(self._comparer.results)

    def _follow(self, wish: Mapping[str, str]) -> None:
        """Sends gradients by the policy's codecs, unless the change is postponed."""
        assert self._current is not None
        analysed, running = self._current.analysed, self._current.planned
        plan = self._codecs.plan_of_policy(running.plan, wish)
        if self._codecs.adopts(
            wish,
            running.plan,
            plan,
            lambda: agreement.shared_number(self.world, self._store.compile_s),
            compiled=self._preparation.has_program(
                analysed, plan, self._preparation.devices(self._setting)
            ),
        ):
            self._use(plan)

    def __repr__(self) -> str:
        """The step's name and plan in one line."""
        if self._current is None and self._setting.plan is None:
            return f"<ParallelStep {self.__name__}, no plan yet>"
        return f"<ParallelStep {self.__name__}, {self.plan!r}>"

    def __set_name__(self, owner: type, name: str) -> None:
        """Takes the name of the decorated method."""
        self.__name__ = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step as a method of an object (`method_of`)."""
        return self if instance is None else method_of(self, instance)

    def jit(
        self,
        function: Callable[Q, S],
        *,
        static_argnames: str | Sequence[str] = (),
        whole_argnames: str | Sequence[str] = (),
    ) -> Evaluation[Q, S]:
        """Compiles a function, such as evaluation, for state with the step's shardings.

        State that the step or `init` returned is not moved. The batch is split over the
        mesh axes that split the step's batch. No argument is donated. With several
        pipeline stages, each call copies the state from the stages and splits it over
        all devices.

        Args:
          function: such as ``evaluate(state, batch)``.
          static_argnames: names of static arguments.
          whole_argnames: names of arguments that each of several processes passes
            whole, such as weights of classes, besides those of the step. Other arrays
            that are not state are rows of a batch.

        Raises:
          PlanError: the function is a ``jax.pmap``. A call raises it if the step has
            not been planned yet.
        """
        return Evaluation(
            function,
            self._running,
            lambda: self.world,
            lambda: self._batches.dims,
            static_argnames,
            whole_argnames,
        )

    def _running(self) -> PlannedStep:
        return self.running.planned

    def shardings(self, state: Any) -> Any:
        """Returns the ``NamedSharding`` of each array of a state under the plan in use.

        Args:
          state: one pytree, or a tuple of the leading arguments; arrays or structs.

        Returns:
          The same trees with a sharding in the place of each array; an NNX object
          becomes its ``nnx.State``.

        Raises:
          PlanError: the step has not been planned, or the state belongs to another
            step.
        """
        running = self._running()
        name_arrays(self.__name__, running.analysis, state, structs=True)
        return creation.with_leaves(state, running.in_shardings)

    @without_mesh()
    def compile(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans and compiles for the arguments (arrays or structs) of the next call."""
        planned = self.prepare(*args, **kwargs)
        self._preparation.compile(planned)
        return planned.plan

    def _make_ready(self) -> None:
        """Compiles a new program on all processes.

        If one process fails, all processes raise its error.
        """
        current = self._current
        if current is None or current.ready:
            return
        planned = current.planned
        if self.world.process_count > 1:
            # A program that has run before is compiled already.
            known = self._preparation.is_compiled(planned)
            work = (lambda _: None) if known else self._preparation.compile
            agreement.run_together(self.world, "compiling", lambda: work(planned))
            agreement.check_plans(self.world, planned.plan)
        self._current = dataclasses.replace(current, ready=True)

    @without_mesh()
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's ``Lowered`` of the planned program for these arguments."""
        return self.prepare(*args, **kwargs).lower()

    @without_mesh()
    def replan(
        self,
        cluster: Cluster | str,
        state: Any,
        devices: Sequence[Any] | None = None,
        *,
        plan: Plan | str | None = None,
        consume: bool = False,
    ) -> Any:
        """Plans for another cluster, moves the state there and returns it.

        The next call of the step runs under the new plan, which is compiled here. If
        `replan` raises an error, nothing has changed: the next call runs under the old
        plan with the old state. Gradients are sent by the ``compression=`` of
        `autopar.parallelize`, or by the codecs of a given plan. Layouts given as
        ``layouts=`` are kept if the cluster has their mesh. Otherwise the planner finds
        new layouts and warns.

        Args:
          cluster: the new cluster, such as ``Cluster.local(devices=4)`` or ``"4:cpu"``.
          state: the carried state: one pytree, or a tuple of the leading
            arguments (NNX: the model and optimizer, updated in place).
          devices: the devices to run on, or their ids; default: the devices that the
            cluster names, or the first devices of the world.
          plan: a plan for the new cluster, or its JSON file, used instead of planning
            for the arguments of the last call.
          consume: whether each old array is freed as soon as it has been moved. Then
            memory never holds both whole states, but an error half-way loses the state.

        Raises:
          ClusterError: the text describes no cluster.
          InfeasibleError: no plan fits the memory of a device.
          PlanError: the step has not been planned before, the state or the plan
            belongs to another step, or a device is missing.
        """
        analysed = self.running.analysed
        made = self._preparation.made_for(
            analysed, self._setting, cluster, devices, plan
        )
        return self.adopt(analysed, made, state, consume=consume)

    def adopt(
        self, analysed: Analysed, made: Made, state: Any, *, consume: bool
    ) -> Any:
        """Moves the state to another plan, which the step uses from the next call on.

        Args:
          analysed: the step on the arguments of the next call.
          made: the plan, and its compiled program.
          state: as for `replan`.
          consume: as for `replan`.
        """
        self._preparation.finish_comparison()
        old = self.running.planned
        with agreement.tell_errors(self.world, "moving the state"):
            arrays = name_arrays(self.__name__, analysed.analysis, state)
        links = self._preparation.links_between(old, made.planned)

        def moving() -> list[Any]:
            self._codecs.check(made.planned.sums)
            return moved_state(arrays, old, made.planned, links, consume=consume)

        moved = agreement.run_together(self.world, "moving the state", moving)
        home = placement.home_of(arrays.values())
        new = creation.replace_leaves(state, placement.given_back(moved, home))
        self._setting = made.setting
        self._codecs.move(links)
        self._codecs.adoption.withdrawn()
        self._current = Running(analysed, made.planned, ready=True)
        self._preparation.remember(analysed, made.setting, made.plan)
        return new

    @property
    def running(self) -> Running:
        """The analysis of the last planned call, and the program of its plan."""
        if self._current is None:
            raise PlanError(
                f"{self.__name__}: no plan yet: call the step first, or make the state "
                "with init(..., batch=...)."
            )
        return self._current

    @property
    def preparation(self) -> Preparation:
        """The object that analyses, plans and builds this step."""
        return self._preparation

    @property
    def setting(self) -> Setting:
        """The cluster, devices and plan that the step was given."""
        return self._setting


def _result_structs(planned: PlannedStep) -> list[jax.ShapeDtypeStruct | None]:
    """The struct of each flat result of a step; None for a constant."""
    graph = planned.analysis.graph
    values = [None if v is None else graph.values[v] for v in graph.outputs]
    return [v and jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
