"""The root of every error that autopar raises, for all its packages.

`autopar.errors` draws the whole tree. A package below ``autopar`` derives its own
errors from these.
"""

import os

__all__ = [
    "AutoparError",
    "InputError",
    "InputTypeError",
    "InternalError",
    "check_path",
    "check_type",
]


class AutoparError(Exception):
    """Base of all errors of the package; the message says what to do."""


class InputError(AutoparError, ValueError):
    """What was given is wrong: a mistake that the user can fix."""


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
