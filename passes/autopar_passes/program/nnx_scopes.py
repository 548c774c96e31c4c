"""Names every NNX module call by its path while a step is traced.

Linen puts module paths into JAX's name stack; NNX does not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
from flax import nnx

_PATH = "_autopar_path"


@contextlib.contextmanager
def module_scopes(graph: Any) -> Generator[None]:
    """Opens a named scope at each call of a module of ``graph``."""
    modules = list(_named_modules(graph))
    classes = {type(m) for _, m in modules if "__call__" in type(m).__dict__}
    saved: dict[type, Callable[..., Any]] = {}
    for cls in classes:
        saved[cls] = cls.__dict__["__call__"]
        cls.__call__ = _add_scope(saved[cls])
    try:
        yield
    finally:
        for cls, call in saved.items():
            cls.__call__ = call


def name_modules(graph: Any) -> None:
    """Writes its path onto every module, for `module_scopes` to read."""
    for path, module in _named_modules(graph):
        object.__setattr__(module, _PATH, "/".join(str(p) for p in path))


def unname_modules(graph: Any) -> None:
    """Takes the paths off again: they are no part of the caller's objects."""
    for _, module in _named_modules(graph):
        if _PATH in vars(module):
            object.__delattr__(module, _PATH)


def _named_modules(graph: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path, node in nnx.iter_graph(graph):
        if isinstance(node, nnx.Module):
            yield path[1:] if path and path[0] == 0 else path, node


def _add_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(self, _PATH, "")
        name = path.rsplit("/", 1)[-1] if path else type(self).__name__
        with jax.named_scope(name):
            return call(self, *args, **kwargs)

    return call_in_scope
