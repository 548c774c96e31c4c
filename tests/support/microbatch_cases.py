"""Runs a step split into microbatches, without a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.steps.analysis import Analysis, analyse
from autopar.steps.microbatches import in_microbatches
from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation, Program, Region, Scalar
from autopar_passes.program.static_leaves import updating
from autopar_passes.program.trace import open_arguments

Step = Callable[..., Any]


def split(step: Step, args: Sequence[Any], count: int, **options: Any) -> Analysis:
    return in_microbatches(analyse(step, args), count, **options)


def run(step: Step, args: Sequence[Any], count: int, **options: Any) -> Any:
    """The results of a step that runs in `count` microbatches."""
    found = split(step, args, count, **options)
    flat = [jax.numpy.asarray(x) for x in open_arguments(step, args).arrays]
    out = jax.jit(lambda *arrays: evaluated(found.program, arrays))(*flat)
    with updating():
        return found.pytrees.result.return_value(out)


def rows_of(array: Any, count: int, number: int, unit: int = 1) -> Any:
    """The rows of one microbatch, by the rule in the documentation."""
    groups = np.asarray(array).reshape(-1, unit, *np.shape(array)[1:])
    return groups[number::count].reshape(-1, *np.shape(array)[1:])


def each(step: Step, state: Any, batch: Any, count: int) -> list[Any]:
    """The results of the step on each microbatch alone."""

    def one(number: int) -> Any:
        return jax.tree.map(lambda x: rows_of(x, count, number), batch)

    return [jax.jit(step)(state, one(m)) for m in range(count)]


def mean_of(results: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: sum(np.asarray(v) for v in x) / len(x), *results)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jax_compat.is_extended(getattr(a, "dtype", np.dtype("float64"))):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def evaluated(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a flat program one equation after another."""
    env = dict(zip(program.body.inputs, (*arrays, *program.constants), strict=True))
    return _region(program.body, env)


def _read(env: dict[int, Any], atom: Any) -> Any:
    return atom.value if isinstance(atom, Scalar) else env[atom]


def _region(region: Region, env: dict[int, Any]) -> list[Any]:
    for eqn in region.equations:
        given = [_read(env, a) for a in eqn.inputs]
        env.update(zip(eqn.outputs, _equation(eqn, given, env), strict=True))
    return [_read(env, a) for a in region.outputs]


def _inside(region: Region, env: dict[int, Any], given: Sequence[Any]) -> list[Any]:
    inner = {**env, **dict(zip(region.inputs, given, strict=True))}
    return [jax.numpy.asarray(x) for x in _region(region, inner)]


def _equation(eqn: Equation, given: list[Any], env: dict[int, Any]) -> list[Any]:
    params = eqn.params
    match eqn.primitive:
        case "scan":
            consts, carry = params["num_consts"], params["num_carry"]
            first = consts + carry

            def step(carried: Any, sliced: Any) -> Any:
                body = (*given[:consts], *carried, *sliced)
                out = _inside(eqn.regions[0], env, body)
                return out[:carry], out[carry:]

            start = [jax.numpy.asarray(x) for x in given[consts:first]]
            end, stacked = jax.lax.scan(
                step, start, given[first:], params["length"], params["reverse"]
            )
            return [*end, *stacked]
        case "while":
            tests, bodies = params["cond_nconsts"], params["body_nconsts"]
            first = tests + bodies
            return list(
                jax.lax.while_loop(
                    lambda c: _inside(eqn.regions[0], env, (*given[:tests], *c))[0],
                    lambda c: _inside(eqn.regions[1], env, (*given[tests:first], *c)),
                    [jax.numpy.asarray(x) for x in given[first:]],
                )
            )
        case "cond":
            branches = [
                lambda *x, r=r: _inside(r, env, x)  # pyright: ignore[reportUnknownLambdaType]
                for r in eqn.regions
            ]
            return list(jax.lax.switch(given[0], branches, *given[1:]))
        case _:
            return jax_compat.bind(eqn.source, *given)
