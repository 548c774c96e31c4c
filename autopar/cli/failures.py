"""Turns errors into exit codes, messages for people and JSON objects for programs.

*Ctrl-C* has to end the command line soon. Python raises `KeyboardInterrupt` in the main
thread only when this thread runs Python code again. This causes two problems. A solver
or compiler in C may run for seconds before the interrupt is raised. And if Python
raises the interrupt in a callback of the garbage collector, such as JAX's callback, the
interrupt is lost. Therefore a second thread also watches for interrupts.

*Spelling.* Messages of the planner spell options as Python arguments, such as
``remat='auto'``. This module turns them into ``--remat auto`` for all messages.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Generator
from typing import Any, cast

import typer

from autopar.planner.option_texts import OPTIONS

# Python arguments that are options of a command, mostly of ``autopar plan``.
_NAMES = (*OPTIONS, "memory", "to")  # ``to`` is an option of ``checkpoint convert``
_ONE = "|".join(_NAMES)
# Matches a Python argument with its value. It does not match inside the text of a
# cluster, such as "8:cpu,memory=4GB".
_GIVEN = re.compile(
    rf"(?<![\w.,:=\[-])({_ONE})="
    r"('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^()]*\)|\{[^{}]*\}|[\w.]*\w)?"
)
_LEFT_OUT = re.compile(rf"\b([Ll]eave) ({_ONE}) out\b")
_CALL = re.compile(r"autopar\.plan\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
# Matches a pin in a message, unless it is already spelled ``--pin``.
_PIN = re.compile(r"(?<![-\w])pin '([^']*)'")
_CLUSTER = re.compile(r"Cluster\.parse\('([^']*)'\)")

# The options of a command that has all planning options.
ALL = frozenset(option.flag for option in OPTIONS.values() if option.flag)


def spell_options(text: str, options: Collection[str] = ALL) -> str:
    """Returns a message in which Python arguments are spelled as options.

    Args:
      text: the message of an error.
      options: the options of the command that failed. A message that advises any other
        option says that it is an option of ``autopar plan``.

    >>> spell_options("try: remat='auto' or memory=4.2GB", ["--remat", "--memory"])
    'try: --remat auto or --memory 4.2GB'
    """

    def option(name: str, value: str = "") -> str:
        flag = OPTIONS[name].flag if name in OPTIONS else f"--{name}"
        if not flag:
            return f"autopar.parallelize({name}={value or '...'})"
        known = flag in options
        if name == "memory" and value and not known:
            return f"memory={value} in --cluster"
        if value == "False" and name in OPTIONS and OPTIONS[name].default is True:
            flag, value = f"--no-{name.replace('_', '-')}", ""
        words = [flag, _value(name, value)]
        return " ".join(x for x in (*([] if known else ["autopar plan"]), *words) if x)

    def call(match: re.Match[str]) -> str:
        parts = [x.partition("=") for x in re.split(r", (?=\w+=)", match[1])]
        words = [option(name, value or "...") for name, _, value in parts]
        return " ".join(["autopar plan", *(x.split("plan ")[-1] for x in words)])

    text = _CALL.sub(call, text)
    text = _GIVEN.sub(lambda m: option(m[1], m[2] or ""), text)
    text = _LEFT_OUT.sub(lambda m: f"{m[1]} {option(m[2])} out", text)
    text = _PIN.sub(lambda m: f"{option('pins')} {shlex.quote(m[1])}", text)
    return _CLUSTER.sub(r"--cluster \1", text)


def _value(name: str, value: str) -> str:
    """Returns a Python value as a word of a shell."""
    if value in ("", "...", "True"):
        return "" if value == "True" else value
    if value.startswith("{"):
        return "PATH=SPEC"
    if value.startswith(("[", "(")):
        parts = [x.strip().strip("'\"") for x in value[1:-1].split(",")]
        return ("+" if name == "microbatches" else ",").join(x for x in parts if x)
    return shlex.quote(value[1:-1]) if value[0] in "'\"" else value


STOPPED = 130
_EVERY_S = 0.1


@contextlib.contextmanager
def stoppable(
    last: Callable[[], None], grace_s: float = 0.8
) -> Generator[Callable[[], None]]:
    """Makes Ctrl-C end this process; must be called in the main thread.

    After Ctrl-C, a second thread raises the interrupt again and again. It stops when
    the main thread leaves this context or calls the yielded function; after this call
    further interrupts are ignored. If the main thread does neither within ``grace_s``,
    the process ends with exit code 130.

    Args:
      last: prints that the process ends. The second thread calls it before it ends the
        process.
      grace_s: the time from the interrupt to the end of the process, in seconds.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    hook, sys.unraisablehook = sys.unraisablehook, _without_interrupts
    watcher = threading.Thread(
        target=_watch, args=(reader, left, last, grace_s), daemon=True
    )
    watcher.start()

    def hear() -> None:
        left.set()
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        yield hear
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
        writer.close()  # so the second thread reads the end of the pipe, and ends
        watcher.join(grace_s)
        reader.close()


def _watch(
    reader: socket.socket,
    left: threading.Event,
    last: Callable[[], None],
    grace_s: float,
) -> None:
    numbers = reader.recv(1)
    while numbers and numbers[0] != signal.SIGINT:
        numbers = reader.recv(1)
    if not numbers:
        return
    for _ in range(round(grace_s / _EVERY_S)):
        if left.wait(_EVERY_S):
            return
        _thread.interrupt_main()
    if os.isatty(sys.__stderr__.fileno() if sys.__stderr__ else 2):
        os.write(2, b"\r\x1b[K\x1b[?25h")  # erases progress, shows the cursor
    last()
    os._exit(STOPPED)


def _without_interrupts(unraisable: Any) -> None:
    """Reports exceptions that no code can catch, such as those in callbacks.

    Interrupts are not reported, because the second thread raises them again.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


DIFFERENT, BAD_INPUT, DOES_NOT_FIT, BUG = 1, 2, 3, 70
COULD_NOT_RUN = DOES_NOT_FIT
EXIT_CODES = (
    (0, "done"),
    (DIFFERENT, "diff: the plans differ; doctor, verify: something is wrong"),
    (BAD_INPUT, "the input is wrong, or the target's own code failed"),
    (DOES_NOT_FIT, "no plan fits the memory of a device; simulate: jobs could not run"),
    (BUG, "a bug in autopar"),
    (STOPPED, "interrupted"),
)
# click's class UsageError. It is a base class of typer's BadParameter. Some versions of
# typer contain a copy of click and do not export the class.
USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__bases__[0])

# The text of an OSError in Python, with the error number and the name of the file.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^:\[\]]+?)(?:: '([^']*)')?(?=\.|\s|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An error as the command line reports it.

    Attributes:
      kind: the name of the error's class.
      message: the message, in one line.
      code: the exit code.
      where: file and line of the user's code that failed; '' if no such code failed.
    """

    kind: str
    message: str
    code: int
    where: str = ""

    @property
    def line(self) -> str:
        """The line that the command line prints."""
        return f"autopar: {self.message}"

    @property
    def data(self) -> dict[str, Any]:
        """The JSON object that ``--json`` prints."""
        fields = {"kind": self.kind, "message": self.message, "exit_code": self.code}
        return {"error": fields | ({"where": self.where} if self.where else {})}


INTERRUPTED = Failure("Interrupted", "stopped.", STOPPED)


def failure_of(
    error: BaseException, command: str = "autopar", options: Collection[str] = ()
) -> Failure:
    """Classifies an error: a mistake of the user, or a bug in autopar.

    Args:
      error: the error that a command raised.
      command: the words of the command, to name its help.
      options: the options of the command.
    """
    kind = type(error).__name__
    if isinstance(error, (typer.Abort, KeyboardInterrupt)):
        return INTERRUPTED
    if isinstance(error, USAGE_ERROR):
        text = getattr(error, "format_message", error.__str__)()
        told = _one_line(f"{text}\nSee {command} --help.")
        return Failure(kind, told, BAD_INPUT)
    # This module imports NumPy, which `--help` must not import.
    from autopar.errors import TargetError, user_line

    where = user_line(error.__cause__ or error)
    text = _one_line(str(error))
    if not isinstance(error, TargetError):  # may name the user's arguments
        text = spell_options(text, options)
    if code := _code(error):
        placed = where and pathlib.PurePath(where).name not in text
        return Failure(kind, f"{text} ({where})" if placed else text, code, where)
    if where:
        text = f"the target's code raised {describe_error(error)} ({where})"
        return Failure(kind, text, BAD_INPUT, where)
    return Failure(kind, f"a bug in autopar: {describe_error(error)}", BUG)


def _code(error: BaseException) -> int:
    """Returns the exit code of an error that the user can fix; 0 for other errors."""
    # This module imports NumPy, which `--help` must not import.
    from autopar.errors import AutoparError, InfeasibleError, InternalError

    if isinstance(error, InfeasibleError):
        return DOES_NOT_FIT
    fixable = isinstance(error, (AutoparError, OSError))
    return BAD_INPUT if fixable and not isinstance(error, InternalError) else 0


def describe_error(error: BaseException) -> str:
    """Returns the class and the message of an error as a sentence."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}."
    return f"{type(error).__name__}: {_one_line(str(error))}".rstrip(".: ") + "."


def _one_line(text: str) -> str:
    """Joins the lines of a message to sentences in one line."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    told = [line for line in lines if line]
    told = [_SYSTEM_ERROR.sub(_system_error, line) for line in told]
    ended = [x if x[-1] in ".:;,?!" else f"{x}." for x in told[:-1]]
    return " ".join([*ended, *told[-1:]])


def _system_error(match: re.Match[str]) -> str:
    """Returns the reason, with the file's name if the message has no name yet."""
    reason, path = match.groups()
    named = path is None or path in match.string[: match.start()]
    return reason if named else f"{path}: {reason}"


def print_traceback(error: BaseException) -> None:
    """Prints the traceback of an error and of its cause to stderr."""
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
