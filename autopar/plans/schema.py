"""The plan's data and its JSON form."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from autopar.errors import PlanError

# Raised by one whenever a field changes its meaning.
SCHEMA = 1

# Per dimension, the names of the mesh axes that split it, major to minor.
Spec = tuple[tuple[str, ...], ...]


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost model expects of one step.

    Attributes:
      step_s: seconds of one step.
      compute_s: the part of it that is work on arrays.
      communication_s: the part of it that is communication.
      communication_bytes: bytes that one device sends.
      peak_memory_bytes: most bytes live at once on one device.
    """

    step_s: float
    compute_s: float
    communication_s: float
    communication_bytes: float
    peak_memory_bytes: float


class SolverReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the plan was found; ``gap`` is (cost - bound) / cost, 0 without a search."""

    status: str
    gap: float
    seconds: float
    cost: float
    bound: float
    meshes: dict[str, float] = {}


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the planning time went, in seconds."""

    trace: float
    graph: float
    solve: float
    total: float


class NodeDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of one node of the contracted graph.

    Attributes:
      name: module path and operator of its root.
      kind: ``input``, ``contraction`` or ``array``.
      factors: size of each factor.
      axes: names of the mesh axes given to each factor, major to minor.
      count: how many operators share the decision.
    """

    name: str
    kind: str
    factors: tuple[int, ...]
    axes: Spec
    count: int = 1


class CopyDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a value's shared copy.

    Attributes:
      name: the operator that makes the value, and its output's position.
      backward: whether the backward readers share it.
      axes: the layout.
      reuse: whether it is the forward copy, kept.
    """

    name: str
    producer: int
    slot: int
    backward: bool
    axes: Spec
    reuse: bool


class GradientDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How one gradient is summed over the devices that hold parts of it.

    Attributes:
      name: path of the parameter.
      value: number of the gradient's value in the program.
      shape: of the whole gradient.
      local_shape: of the part of it that one device sends.
      axes: names of the mesh axes over which it is sent.
      workers: number of devices along them.
      scatter: whether each of them needs only its part of the sum.
      within: names of the mesh axes over which it is summed before, as it is; each
        device along them then sends a part.
      keeps: whether the sum stays split over these; it is gathered otherwise.
      codec: how it is sent, as text; '' leaves it to the compiler.
      feedback: whether what was not sent is added to the next step's gradient.
      average_every: steps between averages of the residuals over the devices; 0:
        never.
      bucket: gradients of one bucket are sent together.
      dense_bytes: bytes that one device sends along ``axes`` without a codec.
      wire_bytes: bytes that one device sends along ``axes`` with it.
      within_bytes: bytes that one device sends along ``within``.
      error: expected relative error of what is sent, in the L2 norm.
      saved_s: seconds a step that the codec saves.
    """

    name: str
    value: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: tuple[str, ...]
    workers: int
    scatter: bool = False
    within: tuple[str, ...] = ()
    keeps: bool = False
    codec: str = ""
    feedback: bool = False
    average_every: int = 0
    bucket: int = 0
    dense_bytes: float = 0.0
    wire_bytes: float = 0.0
    within_bytes: float = 0.0
    error: float = 0.0
    saved_s: float = 0.0


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """Why gradients are sent as they are.

    Attributes:
      mode: ``none``, ``auto``, or the codec that was asked for.
      error_budget: largest relative error of the whole gradient, in the
        optimizer's metric; None: unlimited.
      metric: how errors of different gradients add up.
      error: the relative error of the choice, in that metric.
      reason: the outcome in words.
    """

    mode: str = "none"
    error_budget: float | None = None
    metric: str = ""
    error: float = 0.0
    reason: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An execution plan: everything that was decided, and what it should cost.

    Attributes:
      schema: version of this format.
      version: of autopar that made the plan.
      cluster: the cluster as text.
      mesh: ``{"axes": {name: size}}``, outermost first.
      predicted: the cost model's expectations.
      solver: how the plan was found.
      seconds: where the planning time went.
      inputs: pytree path of each input -> its layout.
      outputs: pytree path of each output with a layout of its own.
      roles: pytree path of each input -> parameter, optimizer state ...
      unsupported_ops: primitives planned replicated for want of a rule.
      assumed: loops whose trip count was assumed.
      fingerprint: of the step that the plan is for.
      nodes: decisions, in the order of the contracted graph.
      copies: decisions about shared copies.
      shapes: pytree path of each input -> its shape.
      target: what the command line made the plan for, such as
        ``file.py:function``; '' for a plan made in a program.
      options: the arguments given to the target's function, as text.
      gradients: how each gradient is summed.
      compression: why so.
    """

    schema: int
    version: str
    cluster: str
    mesh: dict[str, dict[str, int]]
    predicted: Predicted
    solver: SolverReport
    seconds: Seconds
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    roles: dict[str, str]
    unsupported_ops: tuple[str, ...]
    assumed: tuple[str, ...]
    fingerprint: str
    nodes: tuple[NodeDecision, ...]
    copies: tuple[CopyDecision, ...]
    shapes: dict[str, tuple[int, ...]] = {}
    target: str = ""
    options: dict[str, str] = {}
    gradients: tuple[GradientDecision, ...] = ()
    compression: Compression = Compression()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return tuple(self.mesh["axes"])

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes, outermost first."""
        return tuple(self.mesh["axes"].values())

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain dictionaries and lists."""
        return msgspec.to_builtins(self)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the plan as JSON."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        pathlib.Path(path).write_bytes(text + b"\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Reads a plan from a JSON file.

        Raises:
          PlanError: the file is missing, is no plan, or has another schema.
        """
        file = pathlib.Path(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PlanError(f"{file}: cannot be read: {error.strerror}.") from error
        return cls.from_json(data, str(file))

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "plan") -> Plan:
        """Reads a plan from JSON text; ``name`` is what errors call it.

        Raises:
          PlanError: the text is no plan, or has another schema.
        """
        try:
            found = msgspec.json.decode(data, type=_Header).schema
            if found == SCHEMA:
                return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise PlanError(
                f"{name}: not a plan: {error}. Plans are written by Plan.save "
                "or 'autopar plan --out plan.json'."
            ) from error
        raise PlanError(
            f"{name}: has schema {found}, this autopar reads schema {SCHEMA}. "
            "Make the plan again with this version."
        )

    def __str__(self) -> str:
        """The plan as a table."""
        return _renderers[-1](self) if _renderers else repr(self)


# Set by `autopar.reports` when it is imported: this package knows no presentation.
_renderers: list[Callable[[Plan], str]] = []


def set_renderer(render: Callable[[Plan], str]) -> Callable[[Plan], str]:
    """Makes a function the one that ``str`` of a plan calls; a decorator."""
    _renderers[:] = [render]
    return render


class _Header(msgspec.Struct):
    schema: int
