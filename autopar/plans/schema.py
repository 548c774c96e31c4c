"""The plan's data and its JSON form."""

from __future__ import annotations

import importlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from autopar.errors import PlanError
from autopar.plans import files
from autopar.plans.files import ClusterData
from autopar.plans.records import (
    AS_WRITTEN,
    Compression,
    CopyDecision,
    GradientDecision,
    NodeDecision,
    PipelineData,
    Rematerialisation,
    ReplicaPlan,
    StagePlan,
    Worth,
    check_replicas,
)
from autopar.plans.specs import Entries, Spec, matches_path, spec_of
from autopar.whole_files import export_whole
from autopar_errors import check_path
from autopar_passes.layer_loops.split import piece_holders, piece_paths
from autopar_solver.status import Status

# A smaller gap counts as no gap, because two decimal places would show 0.00%.
NO_GAP = 5e-5


def optimality_text(status: str, gap: float) -> str:
    """Returns a text on how close a plan is to the optimum of the searched plans.

    Args:
      status: how the search ended. A list of the user's edits and a semicolon may come
        first.
      gap: (cost - bound) / cost; 1 or more if nothing is known about other plans.

    >>> optimality_text("proved optimal", 0.0)
    'proved optimal'
    >>> optimality_text("proved optimal", 0.0021)
    'proved within 0.21% of the optimum'
    >>> optimality_text("best found, not proved", 0.0302)
    'best found, proved within 3.02% of the optimum'
    >>> optimality_text("best found, not proved", 1.0)
    'best found, not proved'
    >>> optimality_text("layouts as they were given", 0.0)
    'layouts as they were given'
    """
    before, semicolon, ended = status.rpartition("; ")
    if ended not in (Status.OPTIMAL.value, Status.FEASIBLE.value):
        return status
    if ended == Status.OPTIMAL.value and gap < NO_GAP:
        return status
    if not math.isfinite(gap) or gap >= 1.0:
        return f"{before}{semicolon}{Status.FEASIBLE.value}"
    found = "" if ended == Status.OPTIMAL.value else "best found, "
    near = f"{found}proved within {max(gap, NO_GAP):.2%} of the optimum"
    return f"{before}{semicolon}{near}"


# Functions that change a plan's layouts by name.


def with_layouts(
    inputs: Mapping[str, Spec],
    shapes: Mapping[str, Sequence[int]],
    axes: Mapping[str, int],
    layouts: Mapping[str, Entries],
) -> dict[str, Spec]:
    """Returns the layouts of inputs, some of them replaced.

    Args:
      inputs: path of each input -> its layout.
      shapes: path of each input -> its shape.
      axes: size of each mesh axis, by name.
      layouts: path pattern -> layout; a later pattern wins.

    Raises:
      PlanError: a layout does not fit its array.
    """
    out = dict(inputs)
    for pattern, entries in layouts.items():
        for path in inputs:
            if matches_path(path, pattern):
                # A plan may have no shapes. The number of entries is then that of its
                # layout.
                shape = shapes.get(path, (0,) * len(inputs[path]))
                out[path] = spec_of(entries, shape, axes, f"edit: '{path}'")
    return out


# Orders in which the stages of a pipeline may run their microbatches; a plan of one
# stage has no order.
NO_SCHEDULE = "none"
SCHEDULES = (NO_SCHEDULE, "gpipe", "1f1b", "interleaved", "zero-bubble")


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predictions of the cost model for one step.

    Attributes:
      step_s: seconds of one step; ``compute_s + communication_s - hidden_s``.
      compute_s: seconds of work on arrays, including the slowdown by overlapping
        communication.
      communication_s: seconds of communication, including the work of codecs.
      hidden_s: seconds of communication that overlap with work.
      communication_bytes: bytes that one device sends.
      peak_memory_bytes: most bytes live at once on one device.
      low_s: lower end, in seconds, of the interval that should contain 90 % of all
        steps; 0: unknown.
      high_s: upper end, in seconds, of the interval that should contain 90 % of all
        steps; 0: unknown.
    """

    step_s: float
    compute_s: float
    communication_s: float
    communication_bytes: float
    peak_memory_bytes: float
    hidden_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that do not overlap with work."""
        return self.communication_s - self.hidden_s

    def scaled_interval(self, step_s: float) -> tuple[float, float]:
        """``low_s`` and ``high_s``, scaled to a step with another predicted time."""
        times = step_s / self.step_s if self.step_s > 0 else 0.0
        return self.low_s * times, self.high_s * times


class SolverReport(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The solver's result.

    Attributes:
      status: how the search ended. ``proved optimal`` means that no searched plan is
        faster by more than ``gap``, which is then at most 0.5 %.
      gap: (cost - bound) / cost, from 0 to 1; 0 without a search.
      seconds: duration of the search.
      cost: the value that the solver minimised, in seconds.
      bound: a lower bound of the cost over the plans of all meshes.
      meshes: mesh -> predicted seconds of a step of its best plan.
    """

    status: str
    gap: float
    seconds: float
    cost: float
    bound: float
    meshes: dict[str, float] = {}

    @property
    def text(self) -> str:
        """How close the plan is to the optimum, in words."""
        return optimality_text(self.status, self.gap)


class Seconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds of each part of planning."""

    trace: float
    graph: float
    solve: float
    total: float
    compile: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An execution plan: all decisions, and the predicted cost.

    Attributes:
      schema: version of this format.
      version: version of autopar that made the plan.
      cluster: the cluster as data; ``str`` gives its text.
      stages: the work of each group of devices. A plan without a pipeline has one
        stage.
      predicted: predictions of the cost model.
      solver: how the plan was found.
      seconds: duration of each part of planning.
      roles: pytree path of each input -> parameter, optimizer state ...
      unsupported_ops: primitives that are replicated because they have no sharding
        rule.
      assumed: loops whose trip count was assumed, and the parts that the counted work
        of kernels and of the step's own ``shard_map``s leaves out.
      fingerprint: fingerprint of the plan's step, with its shapes.
      structure: fingerprint of the step without its batch size; '' if unknown.
      microbatches: number of microbatches.
      row_multiple: the number to a multiple of which the rows of each microbatch are
        padded; 1: rows are not padded.
      row_blocks: the number of blocks in which rows are sorted that are sorted only to
        group them, such as tokens by their experts; 1: all rows are sorted together.
      row_capacity: the slots that each group has in a block of rows, divided by its
        mean number of rows; 0: rows have no slots, and no device gets rows of others.
      attention_kernel: what computes attention that the step writes out: ``blocks``,
        which computes blocks of scores; ``cudnn``, where cuDNN's attention can, and
        blocks where not; '': the step's own operators.
      loss_blocks: the number of blocks of tokens in which the loss is computed,
        together with the last product of the model; 1: for all tokens at once.
      replicas: the share of each replica, for replicas of unequal devices. The replicas
        are the positions along the mesh's first axis, which splits no array. Empty:
        every device takes part in all microbatches.
      local: values that are computed from the rows of one microbatch only, while the
        step without microbatches computes them from all rows.
      schedule: the order in which stages run microbatches, one of `SCHEDULES`.
      pipeline: how the step is cut into the stages; None for one stage.
      remat: rematerialisation of a plan of one stage; for several stages see
        `pipeline`.
      offload: paths of the state that is in host memory between steps because of the
        plan. The step's own code may put further arrays there.
      compiler_options: options of XLA's compiler that the user gave for the programs of
        the plan, by name.
      decided: the decisions other than layouts, with their gains, for human readers.
      shapes: pytree path of each input -> its shape.
      target: the target of the command line that made the plan, such as
        ``file.py:function``; '' for a plan made in a program.
      options: the arguments given to the target's function, as text.
      compression: the reason for the choice of codecs.
      checks: a checksum of each part, computed when the plan was made; see `edited`.
      compiled_memory_bytes: the most bytes on one device according to the compiler.
        Only plans near the memory limit are compiled for this number
        (`autopar.cost.breakdown.NEAR_LIMIT`); 0: not compiled.
      worth: how well the plan uses its cluster; None if not computed, as in plans of
        earlier versions.

    Raises:
      PlanError: stages share a device, or the schedule does not fit the number of
        stages.
    """

    schema: int
    version: str
    cluster: ClusterData
    stages: tuple[StagePlan, ...]
    predicted: Predicted
    solver: SolverReport
    seconds: Seconds
    roles: dict[str, str]
    unsupported_ops: tuple[str, ...]
    assumed: tuple[str, ...]
    fingerprint: str
    structure: str = ""
    microbatches: int = 1
    row_multiple: int = 1
    row_blocks: int = 1
    row_capacity: float = 0.0
    attention_kernel: str = ""
    loss_blocks: int = 1
    replicas: tuple[ReplicaPlan, ...] = ()
    local: tuple[str, ...] = ()
    schedule: str = NO_SCHEDULE
    pipeline: PipelineData | None = None
    remat: Rematerialisation = AS_WRITTEN
    offload: tuple[str, ...] = ()
    compiler_options: dict[str, bool | int | float | str] = {}
    decided: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = {}
    target: str = ""
    options: dict[str, str] = {}
    compression: Compression = Compression()
    checks: dict[str, str] = {}
    worth: Worth | None = None
    compiled_memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Checks the stages against each other and the schedule."""
        if not self.stages:
            raise PlanError("a plan has at least one stage.")
        if self.microbatches < 1:
            raise PlanError(f"microbatches must be 1 or more, not {self.microbatches}.")
        for name in ("row_multiple", "row_blocks", "loss_blocks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be 1 or more, not {getattr(self, name)}.")
        if not 0 <= self.row_capacity < math.inf:
            raise PlanError(
                f"row_capacity must be a number of at least 0, not {self.row_capacity}."
            )
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"unknown schedule '{self.schedule}'; there are {', '.join(SCHEDULES)}."
            )
        if (len(self.stages) == 1) is not (self.schedule == NO_SCHEDULE):
            raise PlanError(
                f"schedule '{self.schedule}' does not go with {len(self.stages)} "
                f"stages: one stage has '{NO_SCHEDULE}', several have another."
            )
        owner: dict[int, str] = {}
        for stage in self.stages:
            for device in stage.devices:
                if device in owner:
                    raise PlanError(
                        f"stages '{owner[device]}' and '{stage.name}' share device "
                        f"{device}."
                    )
                owner[device] = stage.name
        check_replicas(self.replicas, self.microbatches, self.stages)
        each = any(stage.sums_each_microbatch for stage in self.stages)
        if each and (len(self.stages) > 1 or self.microbatches == 1):
            raise PlanError(
                "sums_each_microbatch is for plans of one stage with two microbatches "
                f"or more; this one has {len(self.stages)} stages and "
                f"{self.microbatches} microbatches. Set it to false."
            )

    @property
    def stage(self) -> StagePlan:
        """The only stage.

        Raises:
          PlanError: there are several stages.
        """
        self.check_one_stage()
        return self.stages[0]

    def check_one_stage(self) -> None:
        """Checks that there is one stage.

        Raises:
          PlanError: there are several stages.
        """
        if len(self.stages) > 1:
            names = ", ".join(f"'{stage.name}'" for stage in self.stages)
            raise PlanError(
                f"this plan has {len(self.stages)} stages; what was asked for works on "
                f"plans of one stage. Look at them one by one in plan.stages: {names}."
            )

    def home(self, path: str) -> int:
        """The number of the stage that holds an input of the step between steps.

        If every stage has equal pieces of an array, the array is on an extra mesh that
        comes after the meshes of the stages (`home_axes`). An array in other pieces is
        on the stage of its first piece.
        """
        if self.pipeline is None:
            return 0
        if path in self.pipeline.pieces:
            stages = [self.pipeline.homes[p] for p in self._pieces(path)]
            sizes, count = self.pipeline.pieces[path], len(self.stages)
            holders = piece_holders(sizes, stages, count)
            return count if len(set(holders)) > 1 else holders[0]
        return self.pipeline.homes[path]

    def home_spec(self, path: str) -> Spec:
        """The layout of an input of the step between steps, on the mesh of its home
        stage.
        """
        if self.pipeline is not None and path in self.pipeline.pieces:
            spec = self.home_spec(self._pieces(path)[0])
            if self.home(path) < len(self.stages):
                return ((), *spec[1:])
            return ((self.stage_axis, *spec[0]), *spec[1:])
        replicated = ((),) * len(self.shapes.get(path, ()))
        return self.stages[self.home(path)].inputs.get(path, replicated)

    @property
    def home_axes(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Names and sizes of the axes of each mesh on which inputs are placed.

        The result has the meshes of the stages. If every stage has a piece of some
        array, the result has one more mesh with an axis of stages in front.
        """
        own = tuple(
            tuple(zip(stage.axis_names, stage.axis_sizes, strict=True))
            for stage in self.stages
        )
        if self.pipeline is None or not self.pipeline.pieces:
            return own
        return (*own, ((self.stage_axis, len(self.stages)), *own[0]))

    @property
    def stage_axis(self) -> str:
        """The name of the axis of stages, which no mesh of a stage has."""
        names = {name for stage in self.stages for name in stage.axis_names}
        return next(n for n in ("stage", "stages", "pipeline_stage") if n not in names)

    @property
    def written_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs of the user's step, before arrays are cut into
        pieces.
        """
        if self.pipeline is None or not self.pipeline.pieces:
            return self.shapes
        first = {self._pieces(path)[0]: path for path in self.pipeline.pieces}
        later = {p for path in self.pipeline.pieces for p in self._pieces(path)[1:]}
        out: dict[str, tuple[int, ...]] = {}
        for path, shape in self.shapes.items():
            if path in first:
                layers = sum(self.pipeline.pieces[first[path]])
                out[first[path]] = (layers, *shape[1:])
            elif path not in later:
                out[path] = shape
        return out

    def _pieces(self, path: str) -> list[str]:
        """Returns the paths of the pieces of an array."""
        assert self.pipeline is not None
        return piece_paths(path, self.pipeline.pieces[path])

    @property
    def mesh(self) -> dict[str, dict[str, int]]:
        """The mesh of the only stage."""
        return self.stage.mesh

    @property
    def inputs(self) -> dict[str, Spec]:
        """Pytree path of each input of the only stage -> its layout."""
        return self.stage.inputs

    @property
    def outputs(self) -> dict[str, Spec]:
        """Pytree path of each output of the only stage that has its own layout."""
        return self.stage.outputs

    @property
    def nodes(self) -> tuple[NodeDecision, ...]:
        """Decisions of the only stage."""
        return self.stage.nodes

    @property
    def copies(self) -> tuple[CopyDecision, ...]:
        """Decisions of the only stage about shared copies."""
        return self.stage.copies

    @property
    def gradients(self) -> tuple[GradientDecision, ...]:
        """How each gradient is summed, stage by stage."""
        if len(self.stages) == 1:
            return self.stages[0].gradients
        return tuple(g for stage in self.stages for g in stage.gradients)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the only stage's mesh axes, outermost first."""
        return self.stage.axis_names

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes of the only stage's mesh axes, outermost first."""
        return self.stage.axis_sizes

    @property
    def digest(self) -> str:
        """16 hex digits of the content, without derived values and durations."""
        still = msgspec.structs.replace(
            self,
            solver=msgspec.structs.replace(self.solver, seconds=0.0),
            seconds=Seconds(trace=0.0, graph=0.0, solve=0.0, total=0.0),
            checks={},
            decided=(),
            worth=None,
            compiled_memory_bytes=0.0,
        )
        return files.digest_of(still)

    @property
    def changed_parts(self) -> tuple[str, ...]:
        """Names of the parts that were changed since the plan was made."""
        return files.changed_parts(self.checks, files.checks_of(self, self.stages))

    edited = changed_parts  # deprecated name, kept for one release

    def with_checks(self) -> Plan:
        """The plan with new checksums: from now on, changes of a part count as edits.

        Numbers are converted to the types of their fields, as when a file is read,
        because checksums must not distinguish 0 from 0.0.
        """
        made = msgspec.convert(msgspec.to_builtins(self), type(self))
        sums = files.checks_of(made, made.stages)
        return msgspec.structs.replace(made, checks=sums)

    def with_stage(self, **changes: Any) -> Plan:
        """The plan with changed fields in its only stage, such as ``gradients=``."""
        stage = msgspec.structs.replace(self.stage, **changes)
        return msgspec.structs.replace(self, stages=(stage,))

    def with_gradients(self, gradients: Sequence[GradientDecision]) -> Plan:
        """Returns the plan with other decisions about its gradients.

        Args:
          gradients: decisions in the plan's order, as many as the plan has; for a plan
            of one stage, any number.

        Raises:
          PlanError: the plan has several stages and another number of gradients.
        """
        if len(self.stages) == 1:
            return self.with_stage(gradients=tuple(gradients))
        if len(gradients) != len(self.gradients):
            raise PlanError(
                f"the stages of the plan have {len(self.gradients)} gradients, and "
                f"{len(gradients)} decisions are given."
            )
        left = iter(gradients)
        stages = [
            msgspec.structs.replace(s, gradients=tuple(islice(left, len(s.gradients))))
            for s in self.stages
        ]
        return msgspec.structs.replace(self, stages=tuple(stages))

    def edit(self, layouts: Mapping[str, Entries]) -> Plan:
        """Returns the plan with other layouts of some inputs.

        This method changes only the inputs. Dependent layouts are planned again, and
        the costs are computed again, when the plan is used with its step: in
        ``autopar.parallelize(plan=)``, ``autopar.plan(..., layouts=)`` and
        ``autopar.audit``.

        Args:
          layouts: path pattern of inputs -> their ``PartitionSpec``, as in
            ``{"state/params/*/kernel": PartitionSpec(None, "tensor")}``, on the mesh
            of their stage. The path of an array of stacked layers names all its pieces.

        Raises:
          PlanError: a pattern matches nothing, or a layout does not fit its array.
        """
        if not isinstance(layouts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"edit: expected a dictionary of path patterns and PartitionSpecs, got "
                f"{type(layouts).__name__}."
            )
        stages: list[StagePlan] = []
        paths = [path for stage in self.stages for path in stage.inputs]
        for pattern in layouts:
            if not any(matches_path(path, pattern) for path in paths):
                raise PlanError(
                    f"edit: '{pattern}' matches no input; inputs are named like "
                    f"{', '.join(paths[:3])}."
                )
        for stage in self.stages:
            axes = stage.mesh["axes"]
            inputs = with_layouts(stage.inputs, self.shapes, axes, layouts)
            stages.append(msgspec.structs.replace(stage, inputs=inputs))
        return msgspec.structs.replace(self, stages=tuple(stages))

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain dictionaries and lists."""
        return msgspec.to_builtins(self)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the plan as JSON."""
        check_path("Plan.save", path)
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        export_whole(path, text + b"\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Reads a plan from a JSON file.

        Raises:
          PlanError: the file is missing, is not a plan, or has another schema.
        """
        return cls.from_json(files.read_bytes(path), str(path))

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "plan") -> Plan:
        """Reads a plan from JSON text; ``name`` is the plan's name in errors.

        Raises:
          PlanError: the text is not a plan, or has another schema.
        """
        fields = files.decode(data, name)
        try:
            plan = msgspec.convert(fields, cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise files.not_a_plan(name, error) from error
        files.check_devices(plan.cluster.read(), plan.stages, name)
        return plan

    def __str__(self) -> str:
        """The plan as a table."""
        return _render("table", self)

    def __repr__(self) -> str:
        """The plan in one line."""
        return _render("line", self)

    def _repr_html_(self) -> str:
        """Returns the plan as HTML, for a cell of a notebook."""
        return _render("cell", self)


# The decoder is created at import, because msgspec crashes if two threads analyse one
# type at the same time. A decoder analyses every type that `msgspec.convert` needs.
_DECODER = msgspec.json.Decoder(Plan)

Renderer = Callable[[Plan], str]

# `autopar.reports` sets the renderers when it is imported, because this package does
# not depend on the presentation.
_renderers: dict[str, Renderer] = {}
_PRESENTATION = "autopar.reports"


def _render(form: str, plan: Plan) -> str:
    """Renders a plan in a form; imports the presentation if necessary."""
    importlib.import_module(_PRESENTATION)
    return _renderers[form](plan)


def set_renderer(form: str) -> Callable[[Renderer], Renderer]:
    """Decorator that registers a function as the renderer of plans in a form.

    Args:
      form: ``table`` for ``str``, ``line`` for ``repr``, ``cell`` for notebooks.
    """

    def register(render: Renderer) -> Renderer:
        _renderers[form] = render
        return render

    return register


# Fields that are not compared: durations of planning, and checksums.
_LEFT_OUT = frozenset({"seconds", "checks", "solver/seconds"})
_MISSING = "-"


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Returns the fields that differ between two plans as plain data, with both values.

    Paths are joined by ``/``. Elements of lists are identified by name if they have a
    name, and otherwise by number. Durations of planning are left out.

    >>> differences({"a": {"b": 1}, "c": [1, 2]}, {"a": {"b": 2}, "c": [1]})
    [('a/b', 1, 2), ('c/1', 2, '-')]
    """
    return [d for d in _walk("", one, other) if d[0] not in _LEFT_OUT]


def _walk(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if path in _LEFT_OUT or one == other:
        return
    pair = (_fields(one), _fields(other))
    if pair[0] is None or pair[1] is None:
        yield path, one, other
        return
    for key in dict.fromkeys([*pair[0], *pair[1]]):
        inner = f"{path}/{key}" if path else str(key)
        values = (fields.get(key, _MISSING) for fields in pair if fields is not None)
        yield from _walk(inner, *values)


def _fields(value: Any) -> Mapping[str, Any] | None:
    """The parts of a value by name; None for a value without parts, such as a
    layout.
    """
    if isinstance(value, Mapping):
        return value
    parts = isinstance(value, Sequence) and not isinstance(value, str)
    if parts and any(isinstance(x, Mapping | int | float) for x in value):
        return {str(_name(x, k)): x for k, x in enumerate(value)}
    return None


def _name(value: Any, position: int) -> Any:
    if isinstance(value, Mapping):
        return value.get("name") or position
    return position
