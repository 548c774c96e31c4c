"""Compiles programs in another process, which takes no time from this one.

XLA compiles for CPUs in threads of its own. They share the cores with the devices, and
do not take the low priority of a thread that asks. The other process runs where the
machine is idle. Even so it takes caches and memory from a step on the other cores, so
it works in bursts and rests between them, until somebody waits for its program. A third
process, the keeper, stops and continues it, and ends it if this one ends. It gets a
lowered program, so it needs neither the step nor its data. Accelerators compute
meanwhile, and a second process could not share them: programs for them are compiled
here.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from typing import IO, Any

import jax

from autopar.errors import AutoparError
from autopar.progress import LOGGER
from autopar.runtime import keeper
from autopar_passes import jax_processes

_LENGTH = struct.Struct("<q")
_COUNT_FLAG = "host_platform_device_count"
# Seconds of a burst and of the rest after it: steps run undisturbed three quarters of
# the time, and programs are there four times as late. A burst is long beside the
# milliseconds that stopping takes.
_BURST_S, _REST_S = 0.1, 0.3


class CompilerError(AutoparError):
    """The other process cannot compile a program."""


class CompilerClosedError(AutoparError):
    """The program is not wanted any more."""


class Compiler:
    """A process of the least priority that compiles for this one's CPU devices.

    It starts with the first program, and ends with `close` or with this process.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: IO[bytes] | None = None  # to the keeper
        self._closed = False
        # One program at a time; `close` does not wait for it.
        self._turn, self._starting = threading.Lock(), threading.Lock()
        # How many wait for a program; with any there are no rests.
        self._waiting = 0
        self._hurry, self._counting = threading.Event(), threading.Lock()

    def compile(self, module: bytes, options: bytes, devices: tuple[int, ...]) -> bytes:
        """Compiles a program (`autopar_passes.jax_processes.compiled_bytes`).

        Raises:
          CompilerError: the other process could not, or is gone.
          CompilerClosedError: `close` was called.
        """
        with self._turn:
            process = self._start_process()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                ids = b"".join(_LENGTH.pack(k) for k in devices)
                for part in (module, options, ids):
                    _put(process.stdin, part)
                process.stdin.flush()
                self._await(process.stdout)
                good, found = _take(process.stdout), _take(process.stdout)
            except (OSError, EOFError) as error:
                self._check_open()
                raise CompilerError(
                    "the process that compiles programs ahead has ended "
                    f"({type(error).__name__})."
                ) from error
        if good != b"1":
            raise CompilerError(found.decode(errors="replace"))
        return found

    @contextlib.contextmanager
    def hurry(self) -> Generator[None]:
        """Within it, the other process does not rest: somebody waits for it."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._counting:
            self._waiting += more
            if self._waiting:
                self._hurry.set()
            else:
                self._hurry.clear()

    def _await(self, answers: IO[bytes]) -> None:
        """Lets the other process work in bursts until it answers, or has ended."""
        if self._orders is None:
            return
        answer = select.poll()
        answer.register(answers, select.POLLIN)
        while not answer.poll(_BURST_S * 1e3):
            if self._hurry.is_set():
                continue
            self._order(keeper.STOP)
            try:
                self._hurry.wait(_REST_S)
            finally:
                self._order(keeper.CONTINUE)

    def _order(self, order: bytes) -> None:
        """Has the keeper stop or continue the other process.

        Raises:
          OSError: the keeper is gone.
          CompilerClosedError: `close` was called.
        """
        with self._starting:
            self._check_open()
            assert self._orders is not None
            self._orders.write(order)

    def close(self) -> None:
        """Ends the other process, also in the middle of a program."""
        with self._starting:
            self._closed = True
            process = self._process
            if process is None:
                return
            if self._orders is None:
                process.kill()
            else:
                self._orders.close()
            process.wait()
        with self._turn:  # who waited for an answer has seen the end
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _start_process(self) -> subprocess.Popen[bytes]:
        with self._starting:
            self._check_open()
            if self._process is None:
                command = [sys.executable, "-m", __name__]
                if os.name == "posix":
                    self._process, self._orders = _start_keeper(command)
                else:
                    self._process = _open_process(command)
            return self._process

    def _check_open(self) -> None:
        if self._closed:
            raise CompilerClosedError("nothing is compiled ahead any more.")


_COMPILER: contextvars.ContextVar[Compiler | None] = contextvars.ContextVar(
    "compiler", default=None
)


@contextlib.contextmanager
def compiled_by(compiler: Compiler) -> Generator[None]:
    """Within it, what this thread compiles by `compile_lowered` is compiled there."""
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def compile_lowered(lowered: Any) -> None:
    """Compiles a lowered function, so that calls of the function find it.

    Where the other process cannot, this one does: a program of the user's may call what
    only this process has.

    Args:
      lowered: `jax.stages.Lowered`.

    Raises:
      CompilerClosedError: the other process was ended by `Compiler.close`.
    """
    compiler = _COMPILER.get()
    if compiler is not None:
        try:
            if jax_processes.compile_by(lowered, compiler.compile):
                return
        except (CompilerError, jax.errors.JaxRuntimeError) as error:
            LOGGER.info("a program is compiled by the process that trains: %s", error)
    lowered.compile()


def _start_keeper(command: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts a command under a keeper; returns the keeper and the pipe for orders."""
    descriptor, orders = os.pipe()
    try:
        words = [sys.executable, keeper.__file__, str(descriptor), *command]
        return _open_process(words, descriptor), open(orders, "wb", buffering=0)
    except BaseException:
        os.close(orders)
        raise
    finally:
        os.close(descriptor)


def _open_process(words: list[str], *descriptors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        pass_fds=descriptors,
        # An interrupt from the keyboard is for the process that trains.
        process_group=0 if os.name == "posix" else None,
    )


def _environment() -> dict[str, str]:
    """Of the other process: as many devices, the same modules, no accelerator."""
    found = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(x or ".") for x in sys.path)
    if _COUNT_FLAG not in found.get("XLA_FLAGS", ""):
        found["JAX_NUM_CPU_DEVICES"] = str(jax_processes.local_device_count())
    # What is compiled ahead is kept by the process that trains.
    found.pop("JAX_COMPILATION_CACHE_DIR", None)
    return found


def _put(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)


def _take(file: IO[bytes]) -> bytes:
    """Reads what `_put` wrote.

    Raises:
      EOFError: the other side is gone.
    """
    (size,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    return _read(file, size)


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _only_when_idle() -> None:
    """Gives this process the least priority that the system has."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compiles what is asked for, until the other side is gone."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            module, options, ids = (_take(requests) for _ in range(3))
            devices = tuple(k for (k,) in _LENGTH.iter_unpack(ids))
            try:
                good, found = (
                    b"1",
                    jax_processes.compiled_bytes(module, options, devices),
                )
            except Exception as error:  # told to who asked
                good, found = b"0", f"{type(error).__name__}: {error}".encode()
            _put(answers, good)
            _put(answers, found)
            answers.flush()


if __name__ == "__main__":
    _only_when_idle()
    # What XLA prints must not get between the answers.
    with open(os.dup(1), "wb") as own:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, own)
