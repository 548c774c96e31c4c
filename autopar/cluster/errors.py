"""The error of this package."""

from autopar_errors import InputError


class ClusterError(InputError):
    """A cluster description is wrong; the message shows one that is right."""
