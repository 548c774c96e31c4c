"""Stands in for packages that the imports of an example need and its step does not.

Data pipelines, loggers and games are imported by the modules that hold the steps. A
stub is made for each of them that is not installed: every name in it is a stub again.
A step that used one would return no array, and fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Packages that only data, logging, games and checkpoints need.
STUBBED = (
    "PIL",
    "cv2",
    "grain",
    "gymnasium",
    "sentencepiece",
    "sklearn",
    "tensorboard",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
)
# Of every stubbed package, for those who compare versions as they are imported.
VERSION = "2.99.0"


class Stub:
    """A name of a stubbed module: it can be called, indexed and inherited from."""

    __version__ = VERSION

    def __init__(self, name: str) -> None:
        """Names it, for people."""
        self._name = name

    def __getattr__(self, name: str) -> Stub:
        """A stub of every public name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        """A stub."""
        return Stub(f"{self._name}()")

    def __getitem__(self, key: Any) -> Stub:
        """A stub."""
        return Stub(f"{self._name}[...]")

    def __or__(self, other: Any) -> Stub:
        """As in the annotation ``tf.Tensor | None``."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """As a base class it adds nothing."""
        return ()

    def __repr__(self) -> str:
        """Says what is missing."""
        return f"<stub of {self._name}>"


class _StubModule(types.ModuleType):
    """A module in which every public name is a stub."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for each missing package, and for the modules in it."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".", 1)[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION


def install(packages: Sequence[str] = STUBBED) -> list[str]:
    """Stubs those of the packages that are not installed; returns their names."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing
