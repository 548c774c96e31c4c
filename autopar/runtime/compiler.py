"""Compiles programs in a second process, so that training steps are not slowed down.

XLA compiles CPU programs in threads of its own. These threads run on the same cores as
the CPU devices, and they do not inherit a low priority from the thread that calls XLA.
A second process can have the lowest priority, so it runs only on idle cores. But it
still shares caches and memory bandwidth with training steps on other cores. So the
second process compiles in short bursts with pauses between them, unless a thread of the
training process waits for its program. A third process, the keeper, pauses and
continues the second process, and ends it when the training process ends. The second
process gets a lowered program, so it needs neither the step nor its data.

Programs for accelerators are compiled in the training process. Accelerators go on
computing while the host compiles, and a second process could not use the same
accelerators.
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
from autopar.runtime.background import abandonable
from autopar_passes import jax_processes

_LENGTH = struct.Struct("<q")
_COUNT_FLAG = "host_platform_device_count"
# Seconds of a burst, and of the pause after it. Training steps run undisturbed for
# three quarters of the time, and compiling takes four times as long as without pauses.
# Pausing the process takes some milliseconds, much less than a burst.
_BURST_S, _REST_S = 0.1, 0.3


class CompilerError(AutoparError):
    """The second process cannot compile a program."""


class CompilerClosedError(AutoparError):
    """The compiler was closed, so the program is no longer needed."""


class Compiler:
    """A process of lowest priority that compiles for the CPU devices of this process.

    The process starts with the first program. It ends with `close` or with this
    process.
    """

    def __init__(self) -> None:
        """Creates a compiler whose process has not started yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: IO[bytes] | None = None  # to the keeper
        self._closed = False
        # `_turn` is locked while a program compiles, because the second process
        # compiles one program at a time. `close` kills the process without waiting for
        # this lock.
        self._turn, self._starting = threading.Lock(), threading.Lock()
        # The number of threads that wait for a program. The second process pauses
        # between bursts only while this number is 0.
        self._waiting = 0
        self._hurry, self._counting = threading.Event(), threading.Lock()

    def compile(self, module: bytes, options: bytes, devices: tuple[int, ...]) -> bytes:
        """Compiles a program (`autopar_passes.jax_processes.compiled_bytes`).

        Raises:
          CompilerError: the other process could not compile the program, or has ended.
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
        """Lets the second process work without pauses inside the ``with`` block."""
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
        """Lets the second process work in bursts until it answers or ends."""
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
        """Tells the keeper to stop or to continue the second process.

        Raises:
          OSError: the keeper has ended.
          CompilerClosedError: `close` was called.
        """
        with self._starting:
            self._check_open()
            assert self._orders is not None
            self._orders.write(order)

    def close(self) -> None:
        """Ends the second process, even while it compiles a program."""
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
        # A thread that waited for an answer releases the lock when the process has
        # ended.
        with self._turn:
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
    """Makes `compile_lowered` use a compiler, in this thread and ``with`` block."""
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def compile_lowered(lowered: Any) -> None:
    """Compiles a lowered function, so that calls of the function need not compile.

    The compiler given to `compiled_by` compiles the function in its process. If that
    fails, this process compiles it: a program may call Python functions that only this
    process has.

    Args:
      lowered: `jax.stages.Lowered`.

    Raises:
      CompilerClosedError: `Compiler.close` ended the second process.
      AbandonedError: this thread's work was abandoned while it compiled.
    """
    compiler = _COMPILER.get()
    if compiler is not None:
        try:
            if jax_processes.compile_by(lowered, compiler.compile):
                return
        except (CompilerError, jax.errors.JaxRuntimeError) as error:
            LOGGER.info("a program is compiled by the process that trains: %s", error)
    with abandonable():
        lowered.compile()


def _start_keeper(command: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts a command under a keeper; returns the keeper and its pipe for orders."""
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
        # Ctrl-C must interrupt only the training process, so the other process has its
        # own process group.
        process_group=0 if os.name == "posix" else None,
    )


def _environment() -> dict[str, str]:
    """Returns the environment variables of the second process.

    With these variables, the second process has the same number of CPU devices, finds
    the same modules, and uses no accelerator.
    """
    found = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(x or ".") for x in sys.path)
    if _COUNT_FLAG not in found.get("XLA_FLAGS", ""):
        found["JAX_NUM_CPU_DEVICES"] = str(jax_processes.local_device_count())
    # The training process caches the programs, so the second process need not.
    found.pop("JAX_COMPILATION_CACHE_DIR", None)
    return found


def _put(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)


def _take(file: IO[bytes]) -> bytes:
    """Reads bytes that `_put` wrote.

    Raises:
      EOFError: the process at the other end has ended.
    """
    (size,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    return _read(file, size)


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _only_when_idle() -> None:
    """Gives this process the lowest priority of the system."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compiles the requested programs until the requesting process has ended."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            module, options, ids = (_take(requests) for _ in range(3))
            devices = tuple(k for (k,) in _LENGTH.iter_unpack(ids))
            try:
                good, found = (
                    b"1",
                    jax_processes.compiled_bytes(module, options, devices),
                )
            except Exception as error:  # becomes the answer
                good, found = b"0", f"{type(error).__name__}: {error}".encode()
            _put(answers, good)
            _put(answers, found)
            answers.flush()


if __name__ == "__main__":
    _only_when_idle()
    # Output that XLA prints must not mix with the answers.
    with open(os.dup(1), "wb") as own:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, own)
