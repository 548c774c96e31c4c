"""Splits a tree of arrays into named arrays and a structure that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError

# The most characters of a dtype's name.
_MOST_LETTERS = 64


def split(
    tree: Any, name: str, kinds: tuple[type, ...] = (jax.Array,)
) -> tuple[dict[str, Any], Any]:
    """Splits a tree into a mapping from names to arrays, and the rest as plain data.

    A named tuple becomes a tuple. Unless ``kinds`` contains NumPy's class of arrays,
    NumPy arrays become plain data, so they should be small.

    Args:
      tree: dictionaries with names as keys, tuples, lists, arrays, numbers and texts.
      name: prefix of the names of the arrays.
      kinds: classes of the arrays that are split off and get names.
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
    """Makes the tree again from the plain data and arrays of `split`.

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
            if len(dtype) > _MOST_LETTERS:  # NumPy may evaluate the text
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
