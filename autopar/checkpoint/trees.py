"""Splits trees of arrays into named arrays and a structure that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError

# An upper limit of the length of a dtype's name.
_MOST_LETTERS = 64


def split(
    tree: Any, name: str, kinds: tuple[type, ...] = (jax.Array,)
) -> tuple[dict[str, Any], Any]:
    """The arrays of a tree by name, and the rest of the tree as plain data.

    A named tuple becomes a tuple. A NumPy array is stored as plain data unless
    ``kinds`` includes its class, so such arrays should be small.

    Args:
      tree: dictionaries with names as keys, tuples, lists, arrays, numbers and texts.
      name: prefix of the names of the arrays.
      kinds: classes of the arrays that get names.
    """
    arrays: dict[str, Any] = {}
    return arrays, _plain(tree, name, kinds, arrays)


def _plain(
    tree: Any, name: str, kinds: tuple[type, ...], arrays: dict[str, Any]
) -> Any:
    if isinstance(tree, kinds):
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, Mapping):
        items = {
            str(k): _plain(x, f"{name}/{k}", kinds, arrays) for k, x in tree.items()
        }
        return {"dict": items}
    if isinstance(tree, (tuple, list)):
        items = [_plain(x, f"{name}/{k}", kinds, arrays) for k, x in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    if isinstance(tree, (np.ndarray, np.generic)):
        data = np.asarray(tree)
        return {"numpy": [str(data.dtype), list(data.shape), data.tobytes().hex()]}
    return {"value": tree}


def join(plain: Any, arrays: Mapping[str, Any]) -> Any:
    """Rebuilds a split tree with these arrays.

    Raises:
      CheckpointError: the data was not made by `split`.
    """
    try:
        ((kind, held),) = plain.items()
        if kind == "array":
            return arrays[held]
        if kind == "dict":
            return {k: join(x, arrays) for k, x in held.items()}
        if kind in ("tuple", "list"):
            items = [join(x, arrays) for x in held]
            return items if kind == "list" else tuple(items)
        if kind == "numpy":
            dtype, shape, text = held
            if len(dtype) > _MOST_LETTERS:  # NumPy reads text as Python code
                raise CheckpointError(f"a name of {len(dtype)} letters is no dtype.")
            data = np.frombuffer(bytes.fromhex(text), np.dtype(dtype))
            return data.reshape(shape).copy()
        if kind == "value":
            return held
    except (
        AttributeError,
        LookupError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"not the structure of a tree: {error!r}.") from error
    raise CheckpointError(f"not the structure of a tree: it has a '{kind}'.")
