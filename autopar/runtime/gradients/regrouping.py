"""Residuals of one parameter that plans keep in different parts.

A plan of several stages sums the gradient of stacked layers in pieces, one for each
stage (``kernel@0:2``), and that of a parameter which several stages use in one part for
each (``table (stage 0)``). Where another plan has other parts, what was not sent of all
of them together is dealt out anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar_passes.layer_loops.paths import whole_path

_STAGE = re.compile(r" \(stage \d+\)$")


def parameter_of(name: str) -> str:
    """The parameter that a part of a gradient belongs to.

    >>> parameter_of("params/kernel@0:2"), parameter_of("table (stage 1)")
    ('params/kernel', 'table')
    """
    alone = _STAGE.sub("", name)
    return whole_path(alone) or alone


def regrouped(
    gradients: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of gradients by the names that a plan has for them.

    Args:
      gradients: name -> residual and codec's state, under the plan before.
      wanted: name -> the same as structs, under the new plan.

    Returns those of the parameters whose parts are others, with residuals of one
    worker, ``(1, *shape)``; the codecs of all parts start anew.
    """
    old, new = _by_parameter(gradients), _by_parameter(wanted)
    out: dict[str, Any] = {}
    for parameter, names in new.items():
        before = old.get(parameter, [])
        if not before or set(before) == set(names):
            continue
        total = _total({name: gradients[name]["residual"] for name in before})
        if total is None:
            continue
        shares = _shares(names, {n: wanted[n]["residual"] for n in names}, total)
        out |= {name: {"residual": x, "codec": ()} for name, x in shares.items()}
    return out


def _by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = defaultdict(list)
    for name in names:
        out[parameter_of(name)].append(name)
    return out


def _layers(name: str) -> tuple[int, int]:
    """The layers of a piece; (0, 0) for what is none."""
    alone = _STAGE.sub("", name)
    if not whole_path(alone):
        return 0, 0
    begin, end = alone.rpartition("@")[2].split(":")
    return int(begin), int(end)


def _total(residuals: Mapping[str, Any]) -> np.ndarray | None:
    """The residuals of all parts and workers together, flat; None: there are none."""
    pieces: dict[tuple[int, int], np.ndarray] = {}
    for name, residual in residuals.items():
        if isinstance(residual, tuple):
            continue
        whole = jnp.sum(jnp.asarray(residual, jnp.float32), axis=0)
        flat, layers = np.asarray(whole).reshape(-1), _layers(name)
        pieces[layers] = pieces[layers] + flat if layers in pieces else flat
    found = [pieces[layers] for layers in sorted(pieces)]
    return np.concatenate(found) if found else None


def _shares(
    names: Iterable[str], structs: Mapping[str, Any], total: np.ndarray
) -> dict[str, np.ndarray]:
    """The parts of a new plan; of several of one piece the first gets all."""
    ordered = sorted(names, key=lambda name: (_layers(name), name))
    count = max(end for _, end in map(_layers, ordered)) or 1
    each, given = total.size // count, set[tuple[int, int]]()
    out: dict[str, np.ndarray] = {}
    for name in ordered:
        struct, (begin, end) = structs[name], _layers(name)
        if isinstance(struct, tuple):
            continue
        part = total[begin * each : end * each] if end else total
        if (begin, end) in given:
            part = np.zeros_like(part)
        given.add((begin, end))
        out[name] = part.reshape(1, *struct.shape[1:])
    return out
