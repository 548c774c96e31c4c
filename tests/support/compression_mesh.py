"""Runs the synchronisation of gradients on a mesh of four simulated workers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, init_state
from autopar.compression.synchronise import synchronise

WORKERS = 4
FED_BACK = Feedback("residual")


@functools.lru_cache(maxsize=64)
def program(
    gradients,
    axes=("data",),
    sizes=(WORKERS,),
    signals=False,
    measured=None,
    summed=False,
):
    """One step of all workers; the first dim of each array counts the workers."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, axes)
    links = MeshLinks(axes, devices.size)

    def one(partials, states, step):
        partials, states = jax.tree.map(lambda a: a[0], (partials, states))
        worker = jax.lax.axis_index(axes)
        out = synchronise(
            gradients,
            partials,
            states,
            links,
            worker,
            step,
            signals=signals,
            # A traced value: with a constant, XLA would keep only one branch.
            measured=None if measured is None else (step >= 0) == measured,
            summed=summed,
        )
        return jax.tree.map(lambda a: a[None], out)

    whole = PartitionSpec(axes)
    return jax.jit(
        jax.shard_map(
            one,
            mesh=mesh,
            in_specs=(whole, whole, PartitionSpec()),
            out_specs=whole,
            check_vma=False,
        )
    )


def begin(gradients):
    """The states of all workers before the first step."""
    states = [init_state(gradient, WORKERS) for gradient in gradients]
    return jax.tree.map(lambda a: jnp.stack([a] * WORKERS), states)


def run(gradients, partials, states=None, step=0, **options):
    """The totals, states and sums of all workers after a step, as numpy arrays."""
    gradients = tuple(gradients)
    partials = [jnp.asarray(p) for p in partials]
    states = begin(gradients) if states is None else states
    out = program(gradients, **options)(partials, states, jnp.int32(step))
    return jax.tree.map(np.asarray, out)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm(values):
    return float(np.linalg.norm(np.asarray(values, np.float64)))
