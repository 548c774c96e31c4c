"""Arrays on the host, which outlive the backend that made them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat


def on_host(tree: Any) -> Any:
    """A tree with numpy arrays in the place of JAX's; keys stay keys."""
    return jax.tree.map(_host, tree)


def _host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax_compat.is_extended(leaf.dtype):
        return _Key(
            np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
        )
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data if leaf.ndim else leaf)
    return leaf


class _Key:
    """A key whose words are on the host."""

    def __init__(self, words: np.ndarray, kind: str) -> None:
        self.words, self.kind = words, kind


def from_host(tree: Any) -> Any:
    """The tree that `hosted` was given, with keys on the backend there is now."""
    return jax.tree.map(
        lambda x: (
            jax.random.wrap_key_data(jnp.asarray(x.words), impl=x.kind)
            if isinstance(x, _Key)
            else x
        ),
        tree,
        is_leaf=lambda x: isinstance(x, _Key),
    )
