"""Threads that call functions under the JAX options of the thread that submits them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from autopar_passes import jax_compat

T = TypeVar("T")


class Threads:
    """Background threads, which do not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        """Starts the threads.

        Args:
          count: the number of threads.
          name: the name of each thread, without its number.
        """
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for number in range(count):
            thread = threading.Thread(
                target=self._serve, name=f"{name}_{number}", daemon=True
            )
            thread.start()

    def _serve(self) -> None:
        while True:
            self._work.get()()

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Calls a function in one of the threads, under this thread's JAX options."""
        future: Future[T] = Future()
        # A context can be entered only once, so each call gets its own.
        options = jax_compat.thread_options()

        def work() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for option in options:
                        stack.enter_context(option)
                    result = function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(work)
        return future
