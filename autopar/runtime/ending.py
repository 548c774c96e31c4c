"""Tells the other processes when this one ends, so that none waits for it.

At the end of a program `jax.distributed` waits minutes for all processes. One that has
failed would keep the others in a collective as long.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time

import jax

from autopar.errors import user_line
from autopar.runtime import exchange
from autopar.runtime.key_values import KeyValueExchange
from autopar_passes import jax_compat

# Where the store keeps the first process that failed and why, and who has ended.
_FAILED, _ENDED = "autopar/failed", "autopar/ended"
# How long the process that hosts the store stays for the others to read it.
_STAY_S, _POLL_S = 3.0, 0.05
# How long the others take to end once they have read it.
_LEAVE_S = 0.5


def announce() -> None:
    """From now on the end of this process is told; no effect without others."""
    if jax_compat.coordination() is not None:
        atexit.unregister(_end)  # one call is enough
        atexit.register(_end)


def leave_at_end() -> None:
    """From now on this process ends without waiting for the others: one is lost."""
    atexit.unregister(jax_compat.leave_coordination)
    atexit.register(jax_compat.leave_coordination)


def _end() -> None:
    """Runs at exit, before `jax.distributed` does: the last one registered is first."""
    found = jax_compat.coordination()
    if found is None or found.count == 1:
        return
    error = getattr(sys, "last_value", None)  # what nobody caught
    service = KeyValueExchange(found.client, found.index, found.count)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        found.client.key_value_set(f"{_ENDED}/{found.index}", "")
    if error is None:
        service.tell(exchange.message_of_end("its program has come to the end", "", ""))
        return
    text = " ".join(str(error).split())
    line = user_line(error)
    service.tell(exchange.message_of_end(text, type(error).__name__, line))
    _report(found, f"{type(error).__name__}: {text}{f' ({line})' if line else ''}")
    if found.index == 0:
        _stay(found)
    jax_compat.leave_coordination()


def _stay(found: jax_compat.Coordination) -> None:
    """Waits a little for the others, who cannot read a store that is gone."""
    end = time.monotonic() + _STAY_S
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while time.monotonic() < end:
            if len(found.client.key_value_dir_get(_ENDED)) == found.count:
                time.sleep(_LEAVE_S)
                return
            time.sleep(_POLL_S)


def _report(found: jax_compat.Coordination, text: str) -> None:
    """Says which process failed first, where that is another one."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found.client.key_value_set(_FAILED, f"process {found.index}: {text}")
            return
        first = found.client.key_value_try_get(_FAILED)
        print(f"autopar: the first failure was that of {first}", file=sys.stderr)
