"""The root of every error that autopar raises, for all its packages.

`autopar.errors` draws the whole tree. A package below ``autopar`` derives its own
errors from these.
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
    """Base of all errors of the package; the message says what to do."""


class InputError(AutoparError, ValueError):
    """What was given is wrong: a mistake that the user can fix."""


class TraceError(InputError):
    """The step cannot be traced by JAX."""


class InputTypeError(AutoparError, TypeError):
    """What was given is of a wrong type: a mistake that the user can fix."""


class InternalError(AutoparError, RuntimeError):
    """autopar, or what it reads of a compiler, is not as it should be; report it."""


def check_type(
    where: str, given: object, kinds: type | tuple[type, ...], wanted: str
) -> None:
    """Checks that an argument is of one of some types.

    Args:
      where: the function and the argument, for the message.
      given: the argument.
      kinds: what it may be.
      wanted: the same for people, with an example.

    Raises:
      InputTypeError: it is of another type.
    """
    if not isinstance(given, kinds):
        raise InputTypeError(f"{where}: expected {wanted}, got {given!r}.")


def check_path(where: str, given: object) -> None:
    """Checks that an argument names a file or a folder; see `check_type`."""
    check_type(where, given, (str, os.PathLike), "a path, such as 'runs/a'")


def user_line(error: BaseException) -> str:
    """File and line of the innermost frame in the user's own code, or ''.

    That is a frame neither of autopar, nor of an installed package, nor of Python.
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
    """A file as people write it: relative where it lies below the working folder."""
    path, here = pathlib.Path(os.path.abspath(name)), pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
