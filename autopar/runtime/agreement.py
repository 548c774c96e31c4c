"""One process plans; all processes check that they hold the same plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.plans.schema import Seconds
from autopar.runtime.world import World
from autopar_passes import jax_compat

# First byte of what process 0 sends: a plan follows, or the text of an error.
_PLAN, _FAILED = b"p", b"e"


def agree(world: World, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: process 0 found none; the other processes raise what it raised.
    """
    if world.process_count == 1:
        return make()
    failure: Exception | None = None
    data = b""
    if world.process_index == 0:
        try:
            data = _PLAN + msgspec.json.encode(make())
        except Exception as error:  # sent on, and raised below
            failure, data = error, _FAILED + str(error).encode()
    received = world.channel.broadcast(data)
    if failure is not None:
        raise failure
    if received[:1] == _FAILED:
        raise PlanError(f"process 0: {received[1:].decode()}")
    return Plan.from_json(received[1:])


def content_digest(plan: Plan) -> str:
    """32 hex digits of what a plan decides; how long planning took is left out.

    A plan keeps them when it is saved and read, which turns whole numbers into
    floats where these are declared.
    """
    solver = msgspec.structs.replace(plan.solver, seconds=0.0)
    zero = Seconds(trace=0.0, graph=0.0, solve=0.0, total=0.0)
    plain = msgspec.structs.replace(plan, solver=solver, seconds=zero)
    plain = Plan.from_json(msgspec.json.encode(plain))
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:32]


def check_same(world: World, plan: Plan, fingerprint: str) -> None:
    """Checks that all processes hold the same plan and trace the same step.

    How long planning took may differ.

    Args:
      world: the processes.
      plan: this process's plan.
      fingerprint: of the step that this process traced.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1:
        return
    every = _gathered(world, content_digest(plan) + fingerprint)
    if len(set(every)) > 1:
        raise PlanError(
            f"the processes hold different plans or trace different steps "
            f"({', '.join(every)}): pass the same plan= and the same step to every "
            "process."
        )


def check_rows(world: World, shapes: Sequence[tuple[int, ...]]) -> None:
    """Checks that every process passes as many rows of the batch.

    Args:
      world: the processes.
      shapes: of the arrays that this process passes.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1:
        return
    every = _gathered(world, repr([tuple(s) for s in shapes]))
    if len(set(every)) > 1:
        raise PlanError(
            "the processes pass arrays of different shapes (this one "
            f"{', '.join(map(str, shapes[:4]))}): a batch is split evenly, each "
            "process passes as many rows. Pad or drop the rest of the last batch."
        )


def check_equal(world: World, leaves: Sequence[Any]) -> None:
    """Checks that arrays of this process alone have the same values everywhere.

    Only a digest is sent.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1 or not leaves:
        return
    digest = hashlib.sha256()
    for leaf in leaves:
        keyed = jax_compat.is_extended(jax.typeof(leaf).dtype)
        array = np.asarray(jax.random.key_data(leaf) if keyed else leaf)
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    if len(set(_gathered(world, digest.hexdigest()))) > 1:
        raise PlanError(
            "state, keys or scalars have different values on the processes: what is "
            "not split over processes must be the same on each. Create them from the "
            "same seed, or with init(...)."
        )


def _gathered(world: World, text: str) -> list[str]:
    """A short digest of each process's text."""
    data = hashlib.sha256(text.encode()).digest()[:4]
    return [row.hex() for row in world.channel.gather(data)]


def shared_number(world: World, value: float) -> float:
    """The first process's number, on every process."""
    return float(shared_array(world, np.asarray(value)))


def shared_array(world: World, values: np.ndarray) -> np.ndarray:
    """The first process's numbers, on every process."""
    if world.process_count == 1:
        return values
    data = world.channel.broadcast(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(data, dtype=values.dtype).reshape(values.shape)
