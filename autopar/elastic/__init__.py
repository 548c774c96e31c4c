"""Training loops that continue when devices leave and join.

The package itself can be called: ``autopar.elastic(...)`` is
`autopar.elastic.train.elastic`. A function of this name in ``autopar`` would hide the
package, or the imported package would hide the function.
"""

import sys
import types
from typing import Any, final


@final
class _Callable(types.ModuleType):
    """This package, as a callable module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `autopar.elastic.train.elastic`."""
        # `train` imports JAX. The command line imports this package to read ledgers,
        # and does not need JAX, so `train` is imported at the first call.
        from autopar.elastic.train import elastic

        return elastic(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
