"""Tests work beside the steps: it is waited for, and compilations are abandoned."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from autopar.runtime.background import AbandonedError, Beside, abandonable


def test_leaving_waits_for_work_but_not_for_a_compilation() -> None:
    beside, begun, planned = Beside(), threading.Event(), threading.Event()
    compiled, ended = threading.Event(), threading.Event()
    found: list[str] = []

    def work() -> None:
        begun.set()
        planned.wait()
        found.append("planned")
        try:
            with abandonable():
                compiled.wait()
            found.append("compiled")  # for nobody
        except AbandonedError:
            found.append("abandoned")
            raise
        finally:
            ended.set()

    beside.do(work)
    begun.wait()
    left = threading.Thread(target=beside.leave)
    left.start()
    left.join(0.05)
    assert left.is_alive()  # the plan is waited for
    planned.set()
    left.join(60)
    assert not left.is_alive()
    assert found == ["planned"]
    beside.wait()  # nor does anybody else wait for it
    compiled.set()
    ended.wait()
    assert found == ["planned", "abandoned"]


def test_a_compilation_that_is_not_abandoned_is_waited_for() -> None:
    beside, found = Beside(), list[str]()
    compiled = threading.Event()

    def work() -> None:
        with abandonable():
            compiled.wait()
        found.append("compiled")

    beside.do(work)
    waits = threading.Thread(target=beside.wait)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    compiled.set()
    waits.join(60)
    assert found == ["compiled"]


def test_a_failure_of_an_abandoned_compilation_is_of_no_interest() -> None:
    beside, begun, compiled = Beside(), threading.Event(), threading.Event()
    found: list[type[BaseException]] = []
    ended = threading.Event()

    def work() -> None:
        try:
            with abandonable():
                begun.set()
                compiled.wait()
                raise RuntimeError("no memory")
        except BaseException as error:
            found.append(type(error))
            raise
        finally:
            ended.set()

    beside.do(work)
    begun.wait()
    beside.leave()
    compiled.set()
    ended.wait()
    assert found == [AbandonedError]


def test_outside_its_threads_nothing_is_abandoned() -> None:
    with abandonable():
        pass
    with pytest.raises(KeyError), abandonable():
        raise KeyError("mine")


ENDING = """
import sys, threading, time
from autopar.runtime.background import Beside, abandonable

begun = threading.Event()

def work():
    with abandonable():
        begun.set()
        time.sleep(600)

beside = Beside()
beside.do(work)
begun.wait()
beside.leave()
print("left")
sys.exit(7)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs on_exit")
def test_a_process_ends_at_once_with_its_own_status() -> None:
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "left\n", "")
    assert time.monotonic() - begin < 300


RETURNING = """
import sys, threading, time
import jax, jax.numpy as jnp
from autopar.runtime.background import Beside, abandonable

begun = threading.Event()

class Slow:
    # Removed while the interpreter ends: XLA returns before it has ended.
    def __del__(self, sleep=time.sleep):
        sleep(3)

sys.modules["slow"] = Slow()

def repeated(x):
    for k in range(100):
        x = jnp.sin(x) @ jnp.cos(x + k)
    return x

lowered = jax.jit(repeated).lower(jnp.ones((8, 8)))

def work():
    with abandonable():
        begun.set()
        lowered.compile()

beside = Beside()
beside.do(work)
begun.wait()
beside.leave()
sys.exit(7)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs on_exit")
def test_a_process_ends_while_an_abandoned_compilation_returns() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", RETURNING], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "", "")


UNFINISHED = """
import threading, time
from autopar.runtime.background import Beside

def work():
    time.sleep(0.2)
    print("done", flush=True)

Beside().do(work)
"""


def test_a_process_waits_at_its_end_for_work_that_is_not_abandoned() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
