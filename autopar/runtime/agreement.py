"""One process plans; all processes check that they hold the same plan."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.plans.differences import differences
from autopar.plans.schema import Seconds
from autopar.runtime.exchange import by_process, differing, exchange_data, tell_errors
from autopar.runtime.world import World
from autopar.steps.program_text import first_difference
from autopar_passes import jax_compat

# Differences that an error names.
_MOST = 4


def agree(world: World, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: process 0 found none; the other processes raise what it raised.
    """
    if world.process_count == 1:
        return make()
    with tell_errors(world, "planning"):
        data = msgspec.json.encode(make()) if world.process_index == 0 else b""
    return Plan.from_json(exchange_data(world, "planning", data)[0])


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


def check_same(
    world: World, plan: Plan, step: str, lines: Callable[[], list[str]]
) -> None:
    """Checks that all processes hold the same plan and trace the same step.

    How long planning took may differ.

    Args:
      world: the processes.
      plan: this process's plan.
      step: identity of the step that this process traced.
      lines: the text of that step, for an error.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1:
        return
    texts = differing(world, "comparing the traced steps", step.encode(), lines)
    if texts is not None:
        raise PlanError(_different_steps(texts))
    check_plans(world, plan)


def check_plans(world: World, plan: Plan) -> None:
    """Checks that all processes hold the same plan, but for its times.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1:
        return
    digest = content_digest(plan).encode()
    plans = differing(world, "comparing the plans", digest, plan.to_json)
    if plans is None:
        return
    odd = _odd(plans)
    first = 0 if odd else 1
    found = differences(plans[first], plans[odd])
    shown = [f"{path} is {a!r} and {b!r}" for path, a, b in found[:_MOST]]
    if len(found) > _MOST:
        shown.append(f"and {len(found) - _MOST} fields more")
    raise PlanError(
        f"the processes hold different plans: on process {first} and process {odd} "
        f"{'; '.join(shown)}. Pass the same plan= to every process."
    )


def _odd(values: Sequence[Any]) -> int:
    """The process that differs from most others; of two, the second."""
    texts = [msgspec.json.encode(value) for value in values]
    common = Counter(texts).most_common(1)[0][0]
    return next(k for k, text in enumerate(texts) if text != common)


def _different_steps(texts: Sequence[list[str]]) -> str:
    odd = _odd(texts)
    first = 0 if odd else 1
    pair = first_difference(texts[first], texts[odd])
    assert pair is not None
    return (
        f"the processes trace different steps: process {odd} differs. The first "
        f"difference is: {pair[0]} on process {first}, {pair[1]} on process {odd}. Run "
        "the same code with the same settings on every process."
    )


def check_rows(world: World, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that every process passes as many rows of the batch.

    Args:
      world: the processes.
      shapes: path -> shape of the arrays that this process passes.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1:
        return
    named = {path: list(shape) for path, shape in shapes.items()}
    key = msgspec.json.encode(named)
    every = differing(world, "comparing shapes of arguments", key, lambda: named)
    if every is None:
        return
    paths = dict.fromkeys(path for had in every for path in had)
    found = {path: [had.get(path, "absent") for had in every] for path in paths}
    differ = [
        f"'{path}' is {by_process(had)}"
        for path, had in found.items()
        if len(set(map(str, had))) > 1
    ]
    more = f"; and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    raise PlanError(
        f"the processes pass arrays of different shapes: {'; '.join(differ[:_MOST])}"
        f"{more}. A batch is split evenly, each process passes as many rows. Pad or "
        "drop the rest of the last batch."
    )


def check_equal(
    world: World, leaves: Mapping[str, Any], *, first: bool = False
) -> None:
    """Checks that arrays of this process alone have the same values everywhere.

    Only a digest is sent, by the devices: this is done in every step.

    Args:
      world: the processes.
      leaves: path -> array.
      first: whether a process may fail in place of this, as in a first step.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1 or not leaves:
        return
    digests = digests_of(leaves)
    key = hashlib.sha256(repr(digests).encode()).digest()
    gather = (
        (lambda: exchange_data(world, "comparing values", key))
        if first
        else (lambda: world.channel.gather(key))
    )
    if len(set(gather())) > 1:
        refuse_different(world, digests)


def digests_of(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Path -> digest of an array that this process has all of."""
    return {path: _digest(leaf) for path, leaf in leaves.items()}


def refuse_different(world: World, digests: Mapping[str, str]) -> None:
    """Says which arrays differ between processes; all must call it.

    Args:
      world: the processes.
      digests: path -> digest of this process's array.

    Raises:
      PlanError: the digests of some arrays differ.
    """
    data = msgspec.json.encode(digests)
    every = exchange_data(world, "comparing values: what differs", data)
    found = [msgspec.json.decode(had) for had in every]
    paths = dict.fromkeys(path for had in found for path in had)
    differ = [p for p in paths if len({had.get(p, "") for had in found}) > 1]
    if not differ:
        return
    more = f" and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    raise PlanError(
        f"{', '.join(map(repr, differ[:_MOST]))}{more}: different values on the "
        "processes. State, keys and scalars, which are not split over processes, must "
        "be the same on each. Create them from the same seed, or with init(...)."
    )


def _digest(leaf: Any) -> str:
    keyed = jax_compat.is_extended(jax.typeof(leaf).dtype)
    array = np.asarray(jax.random.key_data(leaf) if keyed else leaf)
    digest = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def shared_number(world: World, value: float) -> float:
    """The first process's number, on every process."""
    return float(shared_array(world, np.asarray(value)))


def shared_array(world: World, values: np.ndarray) -> np.ndarray:
    """The first process's numbers, on every process."""
    if world.process_count == 1:
        return values
    data = world.channel.broadcast(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(data, dtype=values.dtype).reshape(values.shape)
