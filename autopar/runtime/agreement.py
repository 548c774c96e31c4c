"""One process plans; all processes check that they hold the same plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from autopar.errors import PlanError
from autopar.plans import Plan, Seconds

# First byte of what process 0 sends: a plan follows, or the text of an error.
_PLAN, _FAILED = b"p", b"e"


def agree(make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: process 0 found none; the other processes raise what it raised.
    """
    if jax.process_count() == 1:
        return make()
    failure: Exception | None = None
    data = b""
    if jax.process_index() == 0:
        try:
            data = _PLAN + msgspec.json.encode(make())
        except Exception as error:  # sent on, and raised below
            failure, data = error, _FAILED + str(error).encode()
    received = _from_first(data)
    if failure is not None:
        raise failure
    if received[:1] == _FAILED:
        raise PlanError(f"process 0: {received[1:].decode()}")
    return Plan.from_json(received[1:])


def _from_first(data: bytes) -> bytes:
    """The bytes of process 0, on every process."""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(length, dtype=np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(data, dtype=np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
    return received.astype(np.uint8).tobytes()


def check_same(plan: Plan, fingerprint: str) -> None:
    """Checks that all processes hold the same plan and trace the same step.

    How long planning took may differ.

    Args:
      plan: this process's plan.
      fingerprint: of the step that this process traced.

    Raises:
      PlanError: they do not.
    """
    if jax.process_count() == 1:
        return
    solver = msgspec.structs.replace(plan.solver, seconds=0.0)
    zero = Seconds(trace=0.0, graph=0.0, solve=0.0, total=0.0)
    plain = msgspec.structs.replace(plan, solver=solver, seconds=zero)
    text = msgspec.json.encode(plain) + fingerprint.encode()
    digest = np.frombuffer(hashlib.sha256(text).digest()[:4], dtype=np.uint32)
    every = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1)
    if len(set(every.tolist())) > 1:
        raise PlanError(
            "the processes hold different plans or trace different steps "
            f"({', '.join(f'{d:08x}' for d in every.tolist())}): pass the same plan= "
            "and the same step to every process."
        )


def shared_number(value: float) -> float:
    """The first process's number, on every process."""
    return float(shared_array(np.asarray(value)))


def shared_array(values: np.ndarray) -> np.ndarray:
    """The first process's numbers, on every process, in single precision."""
    if jax.process_count() == 1:
        return values
    shared = multihost_utils.broadcast_one_to_all(values.astype(np.float32))
    return np.asarray(shared)
