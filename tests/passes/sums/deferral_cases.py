"""Steps with partial gradients, and the deferrals found in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.program.trace import trace
from autopar_passes.sums.find import find_deferrals
from autopar_passes.sums.stacked import Deferral

ROWS, WIDTH, PARTS, TIMES, LAYERS = 16, 8, 4, 6, 3
Loss = Callable[[Any, Any], jax.Array]


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)


W = ones(WIDTH, WIDTH)
X = ones(ROWS, WIDTH)
SPLIT = ones(PARTS, ROWS // PARTS, WIDTH)


@dataclasses.dataclass(frozen=True)
class Found:
    """The deferrals of a step, and the step's graph."""

    graph: OperatorGraph
    deferrals: tuple[Deferral, ...]

    @property
    def producer(self) -> dict[int, Operator]:
        return {v: op for op in self.graph.operators for v in op.outputs}

    def gradients(self) -> list[tuple[str, tuple[int, ...]]]:
        """The operator that computes each gradient, and the gradient's shape."""
        return [
            (self.producer[v].kind, tuple(self.graph.values[v].shape))
            for deferral in self.deferrals
            for v in deferral.ends
            if v in deferral.gradients
        ]

    def makers(self, deferral: Deferral) -> list[str]:
        return sorted(self.graph.operators[c].kind for c in deferral.contributions)

    def kinds(self, deferral: Deferral) -> set[str]:
        """The kinds of operators whose results are on a path of a deferral."""
        return {self.producer[v].kind for v in deferral.members}

    @property
    def only(self) -> Deferral:
        """The deferral of the only gradient."""
        (deferral,) = [deferral for deferral in self.deferrals if deferral.gradients]
        return deferral


def find(step: Callable[..., Any], *args: Any) -> Found:
    traced = trace(step, args)
    graph = step_graph(traced)
    return Found(graph, find_deferrals(traced.program, graph))


def updated(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def descent(loss: Loss) -> Callable[..., Any]:
    """One step of gradient descent."""
    return lambda params, batch: updated(params, jax.grad(loss)(params, batch))


def square(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def layers(params: Any, batch: Any) -> jax.Array:
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
    return jnp.mean(out**2)
