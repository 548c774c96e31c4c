"""Lets commands on other machines send requests to a scheduler, over TLS.

The scheduler and the command need the same secret (`autopar secret`), like the
processes of a run over several hosts (`autopar.elastic.processes.network`). A request
(question) and its answer are one message each. The scheduler answers only after it has
stored the result. If an answer is lost, the command sends the same question again, and
the scheduler does not make the change twice.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from autopar.elastic.processes.members import Connection, Message
from autopar.elastic.processes.network import End, Listener, Network, split_address
from autopar.errors import AutoparError, ScheduleError

# Version of the messages. A scheduler refuses a question of another version.
PROTOCOL = 1
# Seconds to wait for a question, and for an answer.
_PATIENCE_S = 30.0
# Seconds for which a command tries to connect again after a broken connection, and
# seconds between two tries.
_TRIES_S, _PAUSE_S = 20.0, 0.5

Answer = Callable[[Message], dict[str, Any]]
# Serves the agent of a host, from its first message on.
ServeHost = Callable[[Message, Connection], None]


class Endpoint:
    """Listens for questions, and answers one question at a time."""

    def __init__(
        self,
        network: Network,
        port: int,
        answer: Answer,
        serve_host: ServeHost | None = None,
    ) -> None:
        """Starts to listen.

        Args:
          network: the address to listen at, and the secret.
          port: the port to listen at; 0 for any free port.
          answer: computes the answer to a question. If it raises an `AutoparError`, the
            command gets the text of the error.
          serve_host: serves the agents of hosts; None: they are refused.

        Raises:
          ScheduleError: there is no secret, or the address or port cannot be used.
        """
        if network.is_local:
            raise ScheduleError("an endpoint needs a secret: `autopar secret FILE`.")
        self._answer, self._lock = answer, threading.Lock()
        self._serve_host = serve_host
        try:
            self._listener: Listener = network.listen(self._serve, port)
        except OSError as error:
            raise ScheduleError(
                f"nobody can listen at {network.address(port)}: {error.strerror}; "
                "name an address of this host and a port that is free."
            ) from error
        self.address = network.address(self._listener.port)

    def close(self) -> None:
        """Stops listening, after the current question has been answered."""
        self._listener.close()
        with self._lock:
            pass

    def _serve(self, end: End) -> None:
        connection = Connection(end)
        connection.patience(_PATIENCE_S)
        message = connection.receive()
        if message is not None and message["kind"] == "host":
            if self._serve_host is not None:
                self._serve_host(message, connection)
                return
            why = "the scheduler has no hosts: start it with --backend hosts."
            connection.send("refused", reason=why)
            message = None
        while message is not None and connection.send("answer", **self._say(message)):
            message = connection.receive()
        connection.close()

    def _say(self, message: Message) -> dict[str, Any]:
        found = message.get("protocol")
        if found != PROTOCOL:
            return {
                "wrong": f"it is asked by protocol {str(found)[:20]} and speaks "
                f"{PROTOCOL}; use one release of autopar on both sides."
            }
        try:
            with self._lock:
                return {"wrong": "", **self._answer(message)}
        except AutoparError as error:
            return {"wrong": str(error)}
        except Exception as error:  # both sides show it; the scheduler goes on
            traceback.print_exc()
            return {"wrong": f"it failed: {type(error).__name__}: {error}"}


def ask(
    network: Network,
    address: str,
    *,
    tries_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    **words: Any,
) -> Message:
    """Asks a scheduler a question; if the connection breaks, asks it again.

    Args:
      network: the secret, and how to connect.
      address: ``HOST:PORT`` of the scheduler's ``--listen``; after commas, where the
        scheduler may be started again.
      tries_s: seconds for which to try again after a broken connection; None: 20 s.
      clock: returns the current time in seconds.
      sleep: waits for a number of seconds.
      **words: the fields of the question.

    Raises:
      InputError: the address does not have this form.
      ScheduleError: the scheduler refuses the question, or has another secret.
      OSError: there was no answer. The scheduler may or may not have got the question.
    """
    calls = address.split(",")
    for one in calls:
        split_address(one)
    end_s = clock() + (_TRIES_S if tries_s is None else tries_s)
    while True:
        try:
            answer = _ask_once(network, calls[0], words, _PATIENCE_S / len(calls))
        except ssl.SSLError as error:
            raise ScheduleError(
                f"{calls[0]} has another secret, or none: give the --secret of its "
                "`autopar schedule --listen`."
            ) from error
        except OSError:
            if clock() >= end_s:
                raise
            calls.append(calls.pop(0))
            sleep(_PAUSE_S)
            continue
        if answer.get("wrong"):
            raise ScheduleError(
                f"the scheduler at {calls[0]} refuses: {answer['wrong']}"
            )
        return answer


def _ask_once(
    network: Network, address: str, words: dict[str, Any], limit_s: float
) -> Message:
    """Asks a question over one connection, made within ``limit_s``; does not try again.

    Raises:
      OSError: the connection is broken.
    """
    try:
        connection = Connection(network.connect(address, limit_s))
    except socket.gaierror as error:
        raise ScheduleError(f"{address}: there is no such host.") from error
    try:
        connection.patience(_PATIENCE_S)
        connection.send("question", protocol=PROTOCOL, **words)
        answer = connection.receive()
    finally:
        connection.close()
    if answer is None:
        raise ConnectionError("the line broke before the answer")
    return answer
