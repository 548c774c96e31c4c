"""Steps to cut into stages, and the composition of their tasks on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Equation, Program, Scalar
from autopar_passes.program.trace import TracedStep, open_arguments, trace
from autopar_passes.stages.cut import Cut, TaskKey, always_before, cut
from autopar_passes.stages.parts import Flow, Parts, parts_of

Case = tuple[Callable[..., Any], tuple[Any, ...]]
WIDTH, ROWS = 6, 4


def normal(seed: int, *shape: int) -> jax.Array:
    return 0.5 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def layers_of(count: int) -> list[dict[str, jax.Array]]:
    return [
        {"w": normal(k, WIDTH, WIDTH), "b": normal(20 + k, WIDTH)} for k in range(count)
    ]


def batch_of() -> dict[str, jax.Array]:
    return {"x": normal(40, ROWS, WIDTH), "y": normal(41, ROWS, WIDTH)}


def sgd(loss: Callable[..., Any], *, clip: bool = False) -> Callable[..., Any]:
    """``step(params, moments, batch)`` with momentum, and the norm of all gradients."""

    def step(params: Any, moments: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if clip:
            squares = jax.tree.map(lambda g: jnp.sum(g * g), grads)
            norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
        return params, moments, value

    return step


def of_loss(loss: Callable[..., Any], params: Any, *, clip: bool = False) -> Case:
    moments = jax.tree.map(jnp.zeros_like, params)
    return sgd(loss, clip=clip), (params, moments, batch_of())


def chain_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for p in params:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def remat_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for p in params:
        x = jax.checkpoint(lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"]))(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


def narrow_loss(params: Any, batch: Any) -> jax.Array:
    """A loss in which layers read two columns of the results of the layers before."""
    x = batch["x"]
    for p in params:
        x = jnp.tanh(x[:, :2] @ p["w"][:2] + p["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def skip_loss(params: Any, batch: Any) -> jax.Array:
    """A loss in which the last layers read results of the first ones, as in a U-Net."""
    x, kept = batch["x"], list[Any]()
    half = len(params) // 2
    for p in params[:half]:
        x = jnp.tanh(x @ p["w"] + p["b"])
        kept.append(x)
    for p, other in zip(params[half:], reversed(kept), strict=True):
        x = jnp.tanh(x @ p["w"] + p["b"]) * other
    return jnp.mean((x - batch["y"]) ** 2)


def tied_loss(params: Any, batch: Any) -> jax.Array:
    """A loss in which the first layer's weights also compute the result."""
    first = params[0]["w"]
    x = batch["x"] @ first
    for p in params[1:]:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((x @ first.T - batch["y"]) ** 2) + jnp.sum(params[0]["b"] ** 2)


def regularised_loss(params: Any, batch: Any) -> jax.Array:
    squares = sum(jnp.sum(p["w"] ** 2) for p in params)
    return chain_loss(params, batch) + 0.01 * squares


def half_loss(params: Any, batch: Any) -> jax.Array:
    """A loss in which all weights are cast at the beginning."""
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    x = batch["x"].astype(jnp.bfloat16)
    for p in narrow:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


def adapted_loss(params: Any, batch: Any) -> jax.Array:
    """A loss of each row at parameters that a step on the row has changed (MAML)."""

    def of_row(x: jax.Array, y: jax.Array) -> jax.Array:
        row = {"x": x[None], "y": y[None]}
        inner = jax.grad(chain_loss)(params, row)
        fast = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
        return chain_loss(fast, {"x": y[None], "y": x[None]})

    return jnp.mean(jax.vmap(of_row)(batch["x"], batch["y"]))


def two_updates_case() -> Case:
    """The second half trains against the first half after its update, as in GANs."""

    def step(one: Any, other: Any, batch: Any) -> Any:
        first, grads = jax.value_and_grad(chain_loss)(one, batch)
        one = jax.tree.map(lambda p, g: p - 0.1 * g, one, grads)

        def against(other: Any) -> jax.Array:
            x = batch["y"]
            for p in [*other, *one]:
                x = jnp.tanh(x @ p["w"] + p["b"])
            return jnp.mean(x**2)

        second, grads = jax.value_and_grad(against)(other)
        other = jax.tree.map(lambda p, g: p - 0.1 * g, other, grads)
        return one, other, first, second

    return step, (layers_of(4)[:2], layers_of(4)[2:], batch_of())


def dropout_case() -> Case:
    def step(params: Any, key: Any, batch: Any) -> Any:
        key, use = jax.random.split(key)

        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            for k, p in enumerate(params):
                x = jnp.tanh(x @ p["w"] + p["b"])
                kept = jax.random.bernoulli(jax.random.fold_in(use, k), 0.8, x.shape)
                x = jnp.where(kept, x, 0)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key, value

    return step, (layers_of(4), jax.random.key(3), batch_of())


CASES: dict[str, Callable[[], Case]] = {
    "chain": lambda: of_loss(chain_loss, layers_of(4)),
    "norm of all gradients": lambda: of_loss(chain_loss, layers_of(4), clip=True),
    "computed again by the step": lambda: of_loss(remat_loss, layers_of(4)),
    "two columns": lambda: of_loss(narrow_loss, layers_of(4)),
    "skip connections": lambda: of_loss(skip_loss, layers_of(4)),
    "tied weights": lambda: of_loss(tied_loss, layers_of(4)),
    "regularised": lambda: of_loss(regularised_loss, layers_of(4)),
    "cast weights": lambda: of_loss(half_loss, layers_of(4)),
    "dropout": dropout_case,
    "inner steps": lambda: of_loss(adapted_loss, layers_of(4)),
    "two updates": two_updates_case,
}


class Traced:
    """A step with its program, its graph, and an order in which it can be cut."""

    def __init__(self, case: Case) -> None:
        step, self.args = case
        self.traced: TracedStep = trace(step, self.args)
        self.program: Program = self.traced.program
        self.graph: OperatorGraph = step_graph(self.traced)
        self.batch = [
            i.value
            for i in self.graph.inputs
            if i.role is InputRole.BATCH and self.graph.values[i.value].shape
        ]
        self.arrays = list(open_arguments(step, self.args).arrays)
        whole = frozenset(self.batch)
        flow = Flow(self.program, self.graph, whole, self.updates())
        self.forward = [
            index
            for index, eqn in flow.equations.items()
            if flow.roles[index] is Role.FORWARD
            and index not in flow.free
            and eqn.primitive == "dot_general"
        ]

    def updates(self) -> frozenset[int]:
        top = {e.index for e in self.program.body.equations}
        found = {op.equation for op in self.graph.operators if op.role is Role.UPDATE}
        return frozenset(found & top)

    def parts(self, count: int) -> Parts:
        """The most parts with at least one product each."""
        step = len(self.forward) / count
        starts = sorted({self.forward[int(k * step)] for k in range(count)})
        return parts_of(self.program, self.graph, starts, batch=self.batch)

    def cut(self, count: int, stages: int, **options: Any) -> Cut:
        parts = self.parts(count)
        return cut(parts, [k % stages for k in range(parts.count)], (), **options)

    def inputs(self) -> dict[int, Any]:
        body = self.program.body
        given = (*self.arrays, *self.program.constants)
        return dict(zip(body.inputs, given, strict=True))

    def whole(self) -> list[Any]:
        known = self.inputs()
        run(self.program.body.equations, known)
        return results(self.program, known)


def run(equations: Sequence[Equation], known: dict[int, Any]) -> None:
    for eqn in equations:
        given = [a.value if isinstance(a, Scalar) else known[a] for a in eqn.inputs]
        made = jax_compat.bind(eqn.source, *given)
        known.update(zip(eqn.outputs, made, strict=True))


def results(program: Program, known: dict[int, Any]) -> list[Any]:
    outputs = program.body.outputs
    return [a.value if isinstance(a, Scalar) else known[a] for a in outputs]


def composed(found: Cut, inputs: dict[int, Any]) -> list[Any]:
    """Runs the tasks one by one, each only with the values that it declares."""
    known = dict(inputs)
    for key in in_order(found):
        task = found.tasks[key]
        own = {v: known[v] for v, _ in task.inputs}
        own |= {v: inputs[v] for v in found.program.body.inputs if v in inputs}
        run([found.parts.flow.equations[i] for i in task.equations], own)
        known.update((v, own[v]) for v in task.outputs)
    return results(found.program, known)


def in_order(found: Cut) -> list[TaskKey]:
    left = list(found.tasks)
    out: list[TaskKey] = []
    while left:
        first = next(k for k in left if not any(always_before(o, k) for o in left))
        left.remove(first)
        out.append(first)
    return out


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        np.array_equal(plain(a), plain(b)) for a, b in zip(one, other, strict=True)
    )


def plain(x: Any) -> np.ndarray:
    keys = jax.dtypes.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x).astype(np.float64)
