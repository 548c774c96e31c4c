"""Debug switches, which are read from the environment here and nowhere else."""

from __future__ import annotations

import os


def verifies() -> bool:
    """Returns whether the passes check the graphs and deferrals that they return.

    The environment variable ``AUTOPAR_VERIFY=1`` says so. The tests set it.
    """
    return os.environ.get("AUTOPAR_VERIFY") == "1"
