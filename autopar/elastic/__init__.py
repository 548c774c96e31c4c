"""Training loops that continue when devices leave and join.

The package itself can be called: ``autopar.elastic(...)`` is
`autopar.elastic.train.elastic`. If ``autopar`` had a function of this name, the
function would hide the package, and importing the package would hide the function.
"""

import sys
import types
from typing import Any, final


@final
class _Callable(types.ModuleType):
    """This package, as a callable module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `autopar.elastic.train.elastic`."""
        # `train` imports JAX. The package must not import JAX at once, because the
        # command line imports it to read ledgers.
        from autopar.elastic.train import elastic

        return elastic(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
