"""Replaces packages that an example imports but that its step does not use.

The modules with the steps also import data pipelines, loggers and games. Each of these
packages that is not installed is replaced by a stub, in which every name is a stub,
too. A step that used a stub would return no array, and fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Packages that are used only for data, logging, games and checkpoints.
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
# The version of every stub package, for code that compares versions at import.
VERSION = "2.99.0"


class Stub:
    """A stub of a name in a module: it can be called, indexed and subclassed."""

    __version__ = VERSION

    def __init__(self, name: str) -> None:
        """Stores the name, for messages."""
        self._name = name

    def __getattr__(self, name: str) -> Stub:
        """Returns a stub for every public name."""
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
        """Allows annotations such as ``tf.Tensor | None``."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Adds no base class to a subclass."""
        return ()

    def __repr__(self) -> str:
        """Names the missing package."""
        return f"<stub of {self._name}>"


class _StubModule(types.ModuleType):
    """A module in which every public name is a stub."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for each missing package and its modules."""

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
    """Installs stubs for the packages that are missing; returns their names."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing
