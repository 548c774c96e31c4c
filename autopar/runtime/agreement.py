"""One process plans; all processes check that they hold the same plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from autopar.errors import PlanError
from autopar.plans import Plan


def agree(make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: the processes do not trace the same step.
    """
    if jax.process_count() == 1:
        return make()
    data = msgspec.json.encode(make()) if jax.process_index() == 0 else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(length, dtype=np.uint8)
    buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8)
    return Plan.from_json(received.tobytes())


def check_same(plan: Plan) -> None:
    """Checks that all processes hold the same plan.

    Raises:
      PlanError: they do not.
    """
    if jax.process_count() == 1:
        return
    text = msgspec.json.encode(plan)
    digest = np.frombuffer(hashlib.sha256(text).digest()[:4], dtype=np.uint32)
    every = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1)
    if len(set(every.tolist())) > 1:
        raise PlanError(
            "the processes hold different plans "
            f"({', '.join(f'{d:08x}' for d in every.tolist())}): pass the same plan= "
            "and the same step to every process."
        )
