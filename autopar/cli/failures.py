"""Turns errors into exit codes, a line for people and an object for programs.

*Ctrl-C* ends the command line soon, whatever runs then. Python raises
`KeyboardInterrupt` in its main thread, once that runs Python again. A solver or
compiler in C runs for seconds before, and where the interrupt is raised in a callback
of the garbage collector, as JAX has one, it is lost. So a thread watches too.

*Spelling.* The planner's messages spell options as Python does, such as
``remat='auto'``. Here they become ``--remat auto``, in one place for all messages.
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

# Arguments in Python that are options of a command, most of them of ``autopar plan``.
_NAMES = (*OPTIONS, "memory", "to")  # ``to`` of a checkpoint
_ONE = "|".join(_NAMES)
# A name with its value, where it is no part of a cluster's text: "8:cpu,memory=4GB".
_GIVEN = re.compile(
    rf"(?<![\w.,:=\[-])({_ONE})="
    r"('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^()]*\)|\{[^{}]*\}|[\w.]*\w)?"
)
_LEFT_OUT = re.compile(rf"\b([Ll]eave) ({_ONE}) out\b")
_CALL = re.compile(r"autopar\.plan\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
# An option of the command line that was given before has two dashes.
_PIN = re.compile(r"(?<![-\w])pin '([^']*)'")
_CLUSTER = re.compile(r"Cluster\.parse\('([^']*)'\)")

# The options of a command that has all of planning.
ALL = frozenset(option.flag for option in OPTIONS.values() if option.flag)


def spell_options(text: str, options: Collection[str] = ALL) -> str:
    """Returns a message with the arguments that it names as options.

    Args:
      text: the message of an error.
      options: those of the command that failed. Any other is one of ``autopar plan``.

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
    """A value of Python as a word of a shell."""
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
    """Makes Ctrl-C end this process; call it in the main thread.

    The interrupt is raised again until the main thread leaves this context, or calls
    what this yields: it has heard, and what it says now is not interrupted. Where it
    does neither in time, the process ends with exit code 130.

    Args:
      last: says that the process ends; called by another thread.
      grace_s: seconds from the interrupt to the end of the process.
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
        writer.close()  # the watcher reads the end of it
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
        os.write(2, b"\r\x1b[K\x1b[?25h")  # the progress line away, the cursor back
    last()
    os._exit(STOPPED)


def _without_interrupts(unraisable: Any) -> None:
    """Reports what nobody can catch, but for interrupts: these are raised again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


DIFFERENT, BAD_INPUT, DOES_NOT_FIT, BUG = 1, 2, 3, 70
COULD_NOT_RUN = DOES_NOT_FIT
EXIT_CODES = (
    (0, "done"),
    (DIFFERENT, "diff: the plans differ; doctor, verify: something is wrong"),
    (BAD_INPUT, "the input is wrong, or the target's own code failed"),
    (
        DOES_NOT_FIT,
        "no plan fits the memory of a device; simulate: jobs could not run",
    ),
    (BUG, "a bug in autopar"),
    (STOPPED, "interrupted"),
)
# click's UsageError, which some versions of typer carry inside and do not export.
USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__bases__[0])

# Python's text of an OSError, with its number and the file's name.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^:\[\]]+?)(?:: '([^']*)')?(?=\.|\s|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An error as the command line reports it.

    Attributes:
      kind: the name of the error's class.
      message: one line.
      code: the exit code.
      where: file and line of the user's code that failed; '' where none did.
    """

    kind: str
    message: str
    code: int
    where: str = ""

    @property
    def line(self) -> str:
        """The line that people read."""
        return f"autopar: {self.message}"

    @property
    def data(self) -> dict[str, Any]:
        """The object that programs read."""
        fields = {"kind": self.kind, "message": self.message, "exit_code": self.code}
        return {"error": fields | ({"where": self.where} if self.where else {})}


INTERRUPTED = Failure("Interrupted", "stopped.", STOPPED)


def failure_of(
    error: BaseException, command: str = "autopar", options: Collection[str] = ()
) -> Failure:
    """Says what an error is: the user's, or a bug of autopar's.

    Args:
      error: what a command raised.
      command: the words of the command, for its help.
      options: those that the command has.
    """
    kind = type(error).__name__
    if isinstance(error, (typer.Abort, KeyboardInterrupt)):
        return INTERRUPTED
    if isinstance(error, USAGE_ERROR):
        text = getattr(error, "format_message", error.__str__)()
        told = _one_line(f"{text}\nSee {command} --help.")
        return Failure(kind, told, BAD_INPUT)
    # It imports JAX, which help must not.
    from autopar.errors import TargetError, user_line

    where = user_line(error.__cause__ or error)
    text = _one_line(str(error))
    if not isinstance(error, TargetError):  # it may name arguments of the user's own
        text = spell_options(text, options)
    if code := _code(error):
        placed = where and pathlib.PurePath(where).name not in text
        return Failure(kind, f"{text} ({where})" if placed else text, code, where)
    if where:
        text = f"the target's code raised {describe_error(error)} ({where})"
        return Failure(kind, text, BAD_INPUT, where)
    return Failure(kind, f"a bug in autopar: {describe_error(error)}", BUG)


def _code(error: BaseException) -> int:
    """The exit code of an error that the user can fix; 0 for any other."""
    # It imports JAX, which help must not.
    from autopar.errors import AutoparError, InfeasibleError, InternalError

    if isinstance(error, InfeasibleError):
        return DOES_NOT_FIT
    fixable = isinstance(error, (AutoparError, OSError))
    return BAD_INPUT if fixable and not isinstance(error, InternalError) else 0


def describe_error(error: BaseException) -> str:
    """An error's class and message, as a sentence."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}."
    return f"{type(error).__name__}: {_one_line(str(error))}".rstrip(".: ") + "."


def _one_line(text: str) -> str:
    """The lines of a message as sentences behind each other."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    told = [line for line in lines if line]
    told = [_SYSTEM_ERROR.sub(_system_error, line) for line in told]
    ended = [x if x[-1] in ".:;,?!" else f"{x}." for x in told[:-1]]
    return " ".join([*ended, *told[-1:]])


def _system_error(match: re.Match[str]) -> str:
    """The reason; the file's name in front where nothing has named it yet."""
    reason, path = match.groups()
    named = path is None or path in match.string[: match.start()]
    return reason if named else f"{path}: {reason}"


def print_traceback(error: BaseException) -> None:
    """Prints the traceback of an error to stderr, with that of its cause."""
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
