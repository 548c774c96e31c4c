"""Runs small steps under random plans, for the planner's tests."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.cluster import Cluster, LinkSpec, MeshAxis, MeshShape
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import traffic
from autopar.layouts.assignment import Assignment, assign
from autopar.layouts.layout import Layout
from autopar.layouts.strategies import Copy, Mode, Strategy, layout_of, strategy_space
from autopar.planner.problem import make_copies
from autopar.steps.analysis import Analysis, analyse_program
from autopar.steps.nodes import Contraction
from autopar.steps.uses import HomeValue, ValueClass
from autopar_passes.audit.partitioned import shardy_collectives
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.layouts import partition_spec
from autopar_passes.program.calls import flat_function
from autopar_passes.program.static_leaves import updating
from autopar_passes.program.trace import TracedStep, open_arguments, trace
from autopar_passes.replay.run import replay
from autopar_passes.sums.stacked import Deferral

MESHES = ((8,), (2, 4), (2, 2, 2))
_NAMES = ("x", "y", "z")
# (kind, mesh axes) -> the bytes that one device sends in one step.
Traffic = dict[tuple[str, tuple[str, ...]], float]


def pricer_of(sizes: Sequence[int]) -> Pricer:
    """A pricer for a mesh of these sizes; tests do not depend on its prices."""
    link = LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    axes = tuple(
        MeshAxis(name=n, size=s, link=link, level=0)
        for n, s in zip(_NAMES, sizes, strict=False)
    )
    return Pricer(Cluster.parse("8:cpu"), MeshShape(axes=axes))


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that was traced and analysed for planning."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    analysis: Analysis

    @property
    def traced(self) -> TracedStep:
        """The traced step, with its pytrees."""
        return self.analysis.pytrees

    @property
    def graph(self) -> OperatorGraph:
        """The operator graph."""
        return self.analysis.graph

    @property
    def contraction(self) -> Contraction:
        """The nodes with a choice."""
        return self.analysis.contraction

    @property
    def sources(self) -> dict[ValueClass, HomeValue]:
        """The values that nodes read, with their readers."""
        return self.analysis.sources

    @property
    def deferrals(self) -> tuple[Deferral, ...]:
        """The paths along which sums may stay partial."""
        return self.analysis.deferrals


def prepare(
    step: Callable[..., Any], args: Sequence[Any], *, share_repeated: bool = True
) -> Case:
    """Traces a step and contracts its graph."""
    traced = trace(step, args)
    graph = step_graph(traced, share_repeated=share_repeated)
    made = analyse_program(traced.program, graph, output_paths=traced.output_paths)
    return Case(step, tuple(args), dataclasses.replace(made, traced=traced))


def all_waiting(case: Case) -> Case:
    """The case with every sum deferred that can be, also outside loops."""
    waiting = tuple(dataclasses.replace(d, hoisted=True) for d in case.deferrals)
    analysis = dataclasses.replace(case.analysis, deferrals=waiting)
    return dataclasses.replace(case, analysis=analysis)


def random_plan(
    case: Case,
    sizes: tuple[int, ...],
    draw: random.Random,
    *,
    density: float = 0.9,
    replicated: bool = False,
) -> Assignment:
    """Chooses a random strategy for every node and every copy.

    ``density`` is the probability that a node must not take its replicated strategy.
    With ``replicated``, every node takes that strategy.
    """
    pricer = pricer_of(sizes)
    strategies: list[Strategy] = []
    for node in case.contraction.nodes:
        space = strategy_space(case.graph, case.contraction, node, sizes).strategies
        sharded = [s for s in space if any(s)]
        options = sharded if sharded and draw.random() < density else space
        strategies.append(space[0] if replicated else draw.choice(options))
    chosen: list[tuple[Copy, int]] = []
    for source in case.sources.values():
        home = layout_of(strategies[source.home.node], source.home.dims)
        start, forward = len(strategies) + len(chosen), None
        for copy in make_copies(case.analysis, source, start, pricer, memory=True):
            allowed = _allowed(copy, home, forward)
            forward = copy, allowed[0] if replicated else draw.choice(allowed)
            chosen.append(forward)
    return assign(
        case.analysis,
        sizes,
        strategies,
        chosen,
    )


def _allowed(copy: Copy, home: Layout, forward: tuple[Copy, int] | None) -> list[int]:
    """The strategies of a copy that the value's layout and the forward copy allow."""
    out: list[int] = []
    for k, (strategy, mode) in enumerate(
        zip(copy.space.strategies, copy.modes, strict=True)
    ):
        if mode is Mode.SAME and layout_of(strategy, copy.dims) != home:
            continue
        if mode is Mode.REUSE:
            assert forward is not None
            other, choice = forward
            kept = other.modes[choice] is not Mode.SAME
            if not kept or other.space.strategies[choice] != strategy:
                continue
        out.append(k)
    return out


def product(sizes: Iterable[int]) -> int:
    """The number of shards over axes of these sizes."""
    return math.prod(sizes)


def mesh_of(sizes: Sequence[int]) -> Mesh:
    """A mesh over the simulated devices."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    names = _NAMES[: len(sizes)]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def lowered(case: Case, plan: Assignment) -> Any:
    """Lowers the replayed step without compiling it."""
    mesh = mesh_of(plan.sizes)
    run = replay(case.traced.program, case.graph, plan, mesh)
    inputs = [
        NamedSharding(mesh, partition_spec(mesh, plan.home_layout(i.value)))
        for i in case.graph.inputs
    ]
    outputs = [
        None if layout is None else NamedSharding(mesh, partition_spec(mesh, layout))
        for layout in (plan.output(k) for k in range(len(case.graph.outputs)))
    ]
    structs = [
        jax.ShapeDtypeStruct(v.shape, v.dtype)
        for v in (case.graph.values[i.value] for i in case.graph.inputs)
    ]
    jitted = jax.jit(run, in_shardings=inputs, out_shardings=outputs)
    return jitted.trace(*structs).lower()


def compiled(low: Any) -> Callable[..., Any]:
    """Compiles without optimising machine code, because tests only check sharding."""
    return low.compile({"xla_backend_optimization_level": 0})


def predicted(plan: Assignment) -> Traffic:
    """The bytes that the plan expects each collective to send."""
    pricer = pricer_of(plan.sizes)
    out: Traffic = collections.defaultdict(float)
    for c in traffic(plan):
        axes = tuple(_NAMES[a] for a in sorted(c.step.axes))
        out[c.step.kind, axes] += c.sent_bytes(pricer)
    return dict(out)


def audited(low: Any) -> Traffic:
    """The bytes that the collectives of the compiler's partitioner send."""
    out: Traffic = collections.defaultdict(float)
    for c in shardy_collectives(low):
        out[c.kind, tuple(sorted(c.axes))] += c.sent_bytes
    return dict(out)


def by_kind(found: Traffic) -> dict[str, float]:
    """Sums the traffic over the mesh axes."""
    out: dict[str, float] = collections.defaultdict(float)
    for (kind, _), nbytes in found.items():
        out[kind] += nbytes
    return dict(out)


def plain(case: Case) -> tuple[list[Any], list[Any]]:
    """The flat arguments, and the flat results of the unplanned step."""
    call = open_arguments(case.step, case.args)
    function, _ = flat_function(case.step, call.form)
    with updating():
        return call.arrays, jax.jit(function)(*call.arrays)


def check_equal(got: Sequence[Any], want: Sequence[Any], rtol: float) -> None:
    """Checks integers and keys exactly, and floats relative to the largest element."""
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        a, b = _host(x), _host(y)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = max(1e-6, float(np.abs(b).max(initial=0.0)))
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


def _host(x: Any) -> np.ndarray:
    x = jax.numpy.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
