"""The root of every error that autopar raises, for all its packages.

`autopar.errors` draws the whole tree. A package below ``autopar`` derives its own
errors from these.
"""

__all__ = ["AutoparError", "InputError", "InputTypeError", "InternalError"]


class AutoparError(Exception):
    """Base of all errors of the package; the message says what to do."""


class InputError(AutoparError, ValueError):
    """What was given is wrong: a mistake that the user can fix."""


class InputTypeError(AutoparError, TypeError):
    """What was given is of a wrong type: a mistake that the user can fix."""


class InternalError(AutoparError, RuntimeError):
    """autopar, or what it reads of a compiler, is not as it should be; report it."""
