"""Debug switches. Only this module reads them from the environment."""

from __future__ import annotations

import os


def verifies() -> bool:
    """Returns whether the passes check the graphs and deferrals that they return.

    The environment variable ``AUTOPAR_VERIFY=1`` enables the checks. The tests set it.
    """
    return os.environ.get("AUTOPAR_VERIFY") == "1"
