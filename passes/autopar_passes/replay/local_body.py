"""Runs the body of a step's own `jax.shard_map` over another mesh than its own.

The types inside a jaxpr name the mesh that it was traced on. So the body is run
equation by equation, calls in line and loops traced anew: then every type comes from
the mesh that the body runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.program.flatten import INLINED, call_body


def run_body(params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Runs the body of a ``shard_map`` on one device's shards.

    Axes of size one of its own mesh, which the mesh around need not have, are bound
    here.

    Args:
      params: parameters of the ``shard_map``.
      args: one device's shards of its operands.
    """
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    alone = {n: 1 for n, size in params["mesh"].shape.items() if size == 1}
    with jax_compat.axis_env(alone):
        return _run(body, (), args)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return np.asarray(atom.val)  # without the mesh in its type
        return env[atom]

    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in INLINED and (body := call_body(eqn)) is not None:
        return _run(*body, args)
    match name:
        case "scan":
            return _scan(eqn.params, args)
        case "while":
            return _while(eqn.params, args)
        case "cond":
            branches = [_function(b) for b in eqn.params["branches"]]
            return jax.lax.switch(args[0], branches, *args[1:])
        case _:
            return jax_compat.bind_anywhere(eqn, *args)


def _function(closed: Any) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed.jaxpr, closed.consts, args)


def _scan(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    body, consts = _function(params["jaxpr"]), args[: params["num_consts"]]
    end = params["num_consts"] + params["num_carry"]

    def step(carry: Any, xs: Any) -> Any:
        out = body(*consts, *carry, *xs)
        return out[: params["num_carry"]], out[params["num_carry"] :]

    carry, stacked = jax.lax.scan(
        step,
        args[params["num_consts"] : end],
        args[end:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    first, both = params["cond_nconsts"], params["body_nconsts"]
    cond, body = _function(params["cond_jaxpr"]), _function(params["body_jaxpr"])
    of_cond, of_body = args[:first], args[first : first + both]
    return jax.lax.while_loop(
        lambda carry: cond(*of_cond, *carry)[0],
        lambda carry: body(*of_body, *carry),
        args[first + both :],
    )
