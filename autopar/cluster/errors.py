"""The error of this package."""


class ClusterError(ValueError):
    """A cluster description is wrong; the message shows one that is right."""
