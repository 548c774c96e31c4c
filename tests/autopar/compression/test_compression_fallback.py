"""Tests the fallback: each step uses the first level that sends enough."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, normal
from jax.sharding import PartitionSpec

from autopar.compression.codecs.lowrank import PowerSGD
from autopar.compression.codecs.quantise import Dense, Int8, Sign
from autopar.compression.codecs.sparse import TopK
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, Gradient, init_state
from autopar.compression.synchronise import (
    init_level_states,
    level_gains,
    synchronise,
    synchronise_levels,
)

SPARSE, MIDDLE = TopK(ratio=0.05, values="f32"), TopK(ratio=0.25, values="f32")


def levels_of(*codecs):
    shapes = {"a": (40, 10), "b": (30,)}
    return tuple(
        tuple(
            Gradient(name, shape, codec, FED_BACK, seed=k)
            for k, (name, shape) in enumerate(shapes.items())
        )
        for codec in codecs
    )


def on_workers(function):
    """Compiles ``function(links, worker, partials, states, step)`` for four devices."""
    devices = np.array(jax.devices()[:WORKERS])
    mesh = jax.sharding.Mesh(devices, ("data",))
    links = MeshLinks(("data",), WORKERS)

    def one(partials, states, step):
        partials, states = jax.tree.map(lambda a: a[0], (partials, states))
        worker = jax.lax.axis_index("data")
        out = function(links, worker, partials, states, step)
        return jax.tree.map(lambda a: jnp.asarray(a)[None], out)

    whole = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(
            one,
            mesh=mesh,
            in_specs=(whole, whole, PartitionSpec()),
            out_specs=whole,
            check_vma=False,
        )
    )


def stacked(states):
    return jax.tree.map(lambda a: jnp.stack([a] * WORKERS), states)


def concentrated(share, seed=0):
    """Partials with nearly the whole squared norm in a fraction of the elements."""
    out = []
    for k, shape in enumerate(((40, 10), (30,))):
        values = np.sign(normal(WORKERS, *shape, seed=seed + k))
        flat = values.reshape(WORKERS, -1)
        flat[:, round(share * flat.shape[1]) :] *= 0.01
        out.append(jnp.asarray(values))
    return out


@functools.cache
def one_level(level):
    """`synchronise` with the codecs of one level."""
    return on_workers(
        lambda links, worker, partials, states, step: synchronise(
            level, partials, states, links, worker, step
        )
    )


def states_of(states, level):
    return [{"residual": s["residual"], "codec": s["codec"][level]} for s in states]


def test_one_program_takes_the_level_that_sends_enough():
    """Three kinds of gradients in turn, against `synchronise` with the level alone."""
    levels = levels_of(SPARSE, MIDDLE, Sign())
    switched = on_workers(
        lambda links, worker, partials, states, step: synchronise_levels(
            levels, partials, states, links, worker, step, 0.75
        )
    )
    # Numpy: arrays that come from the devices would be another kind of argument.
    states = jax.tree.map(np.asarray, stacked(init_level_states(levels, WORKERS)))
    taken = []
    for step, share in enumerate([0.05, 0.25, 1.0, 0.05, 0.25]):
        # Residuals of the steps before would blur what each step is to show.
        for state in states:
            state["residual"] = np.zeros_like(state["residual"])
        partials = concentrated(share, seed=step)
        out = switched(partials, states, jnp.int32(step))
        totals, after, sums, level = jax.tree.map(np.asarray, out)
        assert len(set(level.tolist())) == 1
        k = int(level[0])
        taken.append(k)
        expected = one_level(levels[k])(partials, states_of(states, k), jnp.int32(step))
        found = (totals, states_of(after, k), sums)
        jax.tree.map(np.testing.assert_array_equal, found, tuple(expected))
        for other in {0, 1, 2} - {k}:
            old, new = (
                [codecs["codec"][other] for codecs in side] for side in (states, after)
            )
            jax.tree.map(np.testing.assert_array_equal, old, new)
        states = after
    assert taken == [0, 1, 2, 0, 1]
    assert switched._cache_size() == 1


def test_gains_are_those_that_the_levels_report():
    """Predicted before anything is sent: the sums of `synchronise`, over workers."""
    levels = levels_of(SPARSE, MIDDLE)
    partials = concentrated(0.2)
    states = stacked(init_level_states(levels, WORKERS))
    gains = on_workers(
        lambda links, worker, partials, states, step: level_gains(
            levels, partials, states, links, worker, step
        )
    )(partials, states, jnp.int32(0))
    for k, level in enumerate(levels):
        *_, sums = one_level(level)(partials, states_of(states, k), jnp.int32(0))
        wanted, _, sent, *_ = np.asarray(sums).sum(axis=(0, 1))
        np.testing.assert_allclose(gains[:, k], sent / wanted, rtol=1e-6)


def test_partials_that_are_not_finite_take_the_last_level():
    levels = levels_of(SPARSE, Dense())
    states = stacked(init_level_states(levels, WORKERS))
    run = on_workers(
        lambda links, worker, partials, states, step: synchronise_levels(
            levels, partials, states, links, worker, step, 0.5
        )
    )
    for value, expected in ((math.nan, 1), (math.inf, 1), (0.0, 0)):
        partials = [jnp.zeros((WORKERS, 40, 10)), jnp.zeros((WORKERS, 30))]
        partials[0] = partials[0].at[2, 3, 3].set(value)
        *_, level = run(partials, states, jnp.int32(0))
        assert level.tolist() == [expected] * WORKERS


def test_levels_share_residuals_and_nothing_else():
    levels = levels_of(PowerSGD(rank=2), Int8())
    levels = tuple(level[:1] for level in levels)
    (state,) = init_level_states(levels, WORKERS)
    alone = [init_state(level[0], WORKERS) for level in levels]
    assert jax.tree.structure(state["codec"]) == jax.tree.structure(
        tuple(s["codec"] for s in alone)
    )
    assert state["residual"].shape == (40, 10)


def test_levels_of_different_gradients_are_refused():
    first, second = levels_of(SPARSE, Dense())
    other = tuple(dataclasses.replace(g, feedback=Feedback("none")) for g in second)
    for wrong in ((first, other), (first, second[:1])):
        with pytest.raises(ValueError, match="level 1 holds a"):
            init_level_states(wrong, WORKERS)
    with pytest.raises(ValueError, match="at least one level"):
        init_level_states((), WORKERS)
