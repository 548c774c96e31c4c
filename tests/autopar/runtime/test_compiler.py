"""Tests programs that another process compiles for this one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar.runtime import compiler as compilers
from autopar.runtime import keeper
from autopar.runtime.compiler import (
    Compiler,
    CompilerClosedError,
    CompilerError,
    compile_lowered,
    compiled_by,
)
from autopar_passes import jax_processes


@pytest.fixture(scope="module")
def compiler() -> Generator[Compiler]:
    made = Compiler()
    yield made
    made.close()


def lowered(function: Any) -> tuple[Any, list[Any]]:
    """A lowered function of a replicated and a split array on four devices."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    places = [NamedSharding(mesh, PartitionSpec(*x)) for x in ((), ("data",))]
    arrays = [
        jax.device_put(np.ones(shape, np.float32), place)
        for shape, place in zip(((8, 8), (12, 8)), places, strict=True)
    ]
    return function.lower(*arrays), arrays


def test_a_call_finds_what_another_process_compiled(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    def summed(w: Any, x: Any) -> Any:
        return w + jnp.tanh(x @ w).sum(0)

    function = jax.jit(summed, donate_argnums=0)
    made, (w, x) = lowered(function)
    asked = []

    def compile_there(*arguments: Any) -> bytes:
        asked.append(arguments[2])
        return compiler.compile(*arguments)

    assert jax_processes.compile_by(made, compile_there)
    assert asked == [(0, 1, 2, 3)]
    with jax.log_compiles(True):
        found = function(w, x)
    assert not [r for r in caplog.records if "Compiling jit(summed)" in r.message]
    assert w.is_deleted()
    np.testing.assert_allclose(found, 1.0 + 12 * np.tanh(8.0), rtol=1e-6)


def test_what_only_this_process_has_is_compiled_here(compiler: Compiler) -> None:
    def told(w: Any, x: Any) -> Any:
        struct = jax.ShapeDtypeStruct((), jnp.float32)
        return w + jax.pure_callback(lambda a: np.float32(a[0, 0]), struct, x)

    function = jax.jit(told)
    made, arrays = lowered(function)
    with compiled_by(compiler):
        assert not jax_processes.compile_by(made, compiler.compile)
        compile_lowered(made)
    np.testing.assert_array_equal(function(*arrays), np.full((8, 8), 2.0))


@pytest.mark.parametrize("keeper_dies", [False, True])
def test_a_process_that_is_gone_is_done_without(keeper_dies: bool) -> None:
    own = Compiler()
    own._start_process()
    assert own._process is not None
    os.kill(own._process.pid if keeper_dies else kept(own._process.pid), signal.SIGKILL)
    function = jax.jit(lambda w, x: w * x.sum())
    made, arrays = lowered(function)
    with compiled_by(own):
        compile_lowered(made)
    with pytest.raises(CompilerError, match="has ended"):
        own.compile(b"", b"", ())
    own.close()
    np.testing.assert_array_equal(function(*arrays), np.full((8, 8), 96.0))


def test_nothing_is_compiled_after_the_end() -> None:
    own = Compiler()
    own.close()
    made, _ = lowered(jax.jit(lambda w, x: w - x.sum()))
    with compiled_by(own), pytest.raises(CompilerClosedError):
        compile_lowered(made)


def test_an_error_is_told(compiler: Compiler) -> None:
    with pytest.raises(CompilerError, match="Error"):
        compiler.compile(b"no module", b"", (0,))


def test_every_request_has_an_answer() -> None:
    requests, answers = io.BytesIO(), io.BytesIO()
    for part in (b"no module", b"", b""):
        compilers._put(requests, part)
    compilers._put(requests, b"cut off")
    requests.seek(0)
    compilers.serve(requests, answers)
    answers.seek(0)
    assert compilers._take(answers) == b"0"
    assert b"Error" in compilers._take(answers)
    assert answers.read() == b""


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Orders for the process that compiles, with short pauses."""
    sent: list[bytes] = []
    send = Compiler._order

    def recorded(compiler: Compiler, order: bytes) -> None:
        sent.append(order)
        send(compiler, order)

    monkeypatch.setattr(Compiler, "_order", recorded)
    monkeypatch.setattr(compilers, "_BURST_S", 1e-3)
    monkeypatch.setattr(compilers, "_REST_S", 1e-3)
    return sent


def test_it_rests_between_bursts(compiler: Compiler, orders: list[bytes]) -> None:
    function = jax.jit(lambda w, x: (w @ w).sum() + jnp.sin(x))
    made, arrays = lowered(function)
    with compiled_by(compiler):
        compile_lowered(made)
    stops = len(orders) // 2
    assert stops
    assert orders == [keeper.STOP, keeper.CONTINUE] * stops
    np.testing.assert_allclose(function(*arrays), 512 + np.sin(1.0), rtol=1e-6)


def test_it_does_not_rest_while_somebody_waits(
    compiler: Compiler, orders: list[bytes]
) -> None:
    made, _ = lowered(jax.jit(lambda w, x: (w @ w).sum() + jnp.cos(x)))
    with compiled_by(compiler), compiler.hurry(), compiler.hurry():
        compile_lowered(made)
    assert not orders
    with compiler.hurry():
        pass
    assert not compiler._hurry.is_set()


def test_who_waits_ends_a_rest(
    compiler: Compiler, orders: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_REST_S", 3600.0)
    made, _ = lowered(jax.jit(lambda w, x: (w @ w).sum() + jnp.tan(x)))

    def compile_there() -> None:
        with compiled_by(compiler):
            compile_lowered(made)

    thread = threading.Thread(target=compile_there)
    thread.start()
    while not orders:
        time.sleep(1e-3)
    with compiler.hurry():
        thread.join()
    assert orders == [keeper.STOP, keeper.CONTINUE]


ORPHAN = """
import os, signal
from autopar.runtime import keeper
from autopar.runtime.compiler import Compiler
compiler = Compiler()
process = compiler._start_process()
name = f"/proc/{process.pid}/task/{process.pid}/children"
while not (pids := open(name).read().split()):
    pass
compiler._order(keeper.STOP)
print(process.pid, *pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rest_does_not_outlive_who_asked() -> None:
    found = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE)
    pids = [int(x) for x in found.stdout.split()]
    assert len(pids) == 2
    for _ in range(1000):
        if not any(is_running(x) for x in pids):
            return
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    pytest.fail("the other process is still there.")


def kept(pid: int) -> int:
    """The process that compiles, once it has started."""
    while True:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            if found := file.read().split():
                return int(found[0])


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
