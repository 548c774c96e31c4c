"""The backends by name."""

from typing import Literal

from autopar_errors import InputError
from autopar_solver.ilp.cbc import solve_cbc
from autopar_solver.ilp.highs import solve_highs
from autopar_solver.ilp.program import Backend

BackendName = Literal["highs", "cbc"]


def backend_of(name: str) -> Backend:
    """Returns the backend of a name.

    Raises:
        InputError: there is none.
    """
    backends: dict[str, Backend] = {"highs": solve_highs, "cbc": solve_cbc}
    if name not in backends:
        raise InputError(f'backend {name!r}: there are only "highs" and "cbc".')
    return backends[name]
