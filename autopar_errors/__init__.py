"""The base classes of all errors that autopar raises, for all its packages.

`autopar.errors` shows the whole tree. The packages that ``autopar`` imports derive
their errors from these classes.
"""

import inspect
import os
import pathlib
import sysconfig
import traceback
import warnings

__all__ = [
    "AutoparError",
    "InputError",
    "InputTypeError",
    "InternalError",
    "TraceError",
    "check_path",
    "check_type",
    "user_line",
    "warn_user",
]


class AutoparError(Exception):
    """Base class of all errors of autopar; the message says what to do."""


class InputError(AutoparError, ValueError):
    """A value given by the user is wrong; the user can fix it."""


class TraceError(InputError):
    """JAX cannot trace the step."""


class InputTypeError(AutoparError, TypeError):
    """A value given by the user has a wrong type; the user can fix it."""


class InternalError(AutoparError, RuntimeError):
    """An internal error of autopar, or unexpected compiler output; please report it."""


# Characters of a wrong argument that a message shows.
_MOST_SHOWN = 200


def check_type(
    where: str, given: object, kinds: type | tuple[type, ...], wanted: str
) -> None:
    """Checks that an argument has one of the allowed types.

    Args:
      where: the function and the argument, for the message.
      given: the argument.
      kinds: the allowed types.
      wanted: a description of the allowed types with an example, for the message.

    Raises:
      InputTypeError: the argument has another type.
    """
    if not isinstance(given, kinds):
        shown = repr(given)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}... ({type(given).__name__})"
        raise InputTypeError(f"{where}: expected {wanted}, got {shown}.")


def check_path(where: str, given: object) -> None:
    """Checks that an argument names a file or a folder; see `check_type`."""
    check_type(where, given, (str, os.PathLike), "a path, such as 'runs/a'")


def user_line(error: BaseException) -> str:
    """Returns file and line of the innermost frame in the user's own code, or ''.

    The user's own code is all code except autopar, installed packages and Python's
    standard library.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_shown(error.filename)}:{error.lineno}"
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith("<") and not _foreign(name):
            found = f"{_shown(name)}:{line}"
    return found


def warn_user(message: str) -> None:
    """Warns at the innermost line of the user's own code (`user_line`)."""
    stack = traceback.walk_stack(inspect.currentframe())
    names = [frame.f_code.co_filename for frame, _ in stack]
    own = (k for k, n in enumerate(names) if not n.startswith("<") and not _foreign(n))
    warnings.warn(message, stacklevel=1 + next(own, len(names) - 1))


def _foreign(name: str) -> bool:
    path = pathlib.PurePath(os.path.abspath(name))
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return True
    root = pathlib.PurePath(__file__).parents[1]
    ours = [root / "autopar", root / "autopar_errors"]
    ours += [root / place / f"autopar_{place}" for place in ("passes", "solver")]
    python = pathlib.PurePath(sysconfig.get_path("stdlib"))
    return any(path.is_relative_to(folder) for folder in (*ours, python))


def _shown(name: str) -> str:
    """Returns a path for messages; relative if it lies below the working folder."""
    path, here = pathlib.Path(os.path.abspath(name)), pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
