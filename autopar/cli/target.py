"""Loads the target of a command: a function that returns a step and its arguments.

A target is ``file.py:function`` or ``module:function``. The function is called with the
``key=value`` words of the command line. It returns ``(train_step, state, batch)``;
further arguments of the step may follow the batch. If the state is a plain tuple, its
elements are the leading arguments of the step. The function may also return a
dictionary with ``step``, ``args`` and other arguments of `autopar.plan`, such as
``batch_argnames``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.cli.failures import describe_error
from autopar.errors import TargetError, TraceError
from autopar.steps.analysis import Analysis, analyse
from autopar.units import guess
from autopar_errors import check_type
from autopar_passes.jax_compat import without_devices
from autopar_passes.program.calls import NOT_NAMED, NamedRoles, argument_names

EXAMPLE = "Example: train.py:workload."
_BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "none",
}
_NAMES = {"int": int, "float": float, "bool": bool, "str": str}


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A train step, and the arguments with which it is planned.

    Attributes:
      step: the train step.
      args: the arguments of the step, arrays or shapes.
      target: the text of the target.
      options: the arguments of the target's function, as text.
      kwargs: the keyword arguments of the step.
      static: names of arguments that are static, as in ``jax.jit``.
      roles: the roles of arguments, as the target names them.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    target: str
    options: dict[str, str]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    static: tuple[str, ...] = ()
    roles: NamedRoles = NOT_NAMED

    def analyse_step(self) -> Analysis:
        """Traces the step.

        Raises:
          TraceError: JAX cannot trace the step.
        """
        return analyse(self.step, self.args, self.kwargs, self.static, self.roles)


def load(target: str, options: dict[str, str]) -> Workload:
    """Loads a target, calls its function, and checks the returned value.

    Raises:
      TargetError: the target cannot be loaded or called, or returns a wrong value.
    """
    function = find(target)
    arguments = convert(target, function, options)
    try:
        # The function may trace the model to get the shapes of the state.
        with without_devices():
            made = function(**arguments)
    except (TargetError, TraceError):
        raise
    except SystemExit as error:
        raise TargetError(f"{target} called {_exit(error)}.") from error
    except Exception as error:  # the user's function may raise any exception
        raise TargetError(f"{target} raised {describe_error(error)}") from error
    if isinstance(made, dict):
        return _from_dictionary(target, typing.cast("dict[str, Any]", made), options)
    if not isinstance(made, tuple) or len(made) < 3 or not callable(made[0]):
        raise TargetError(
            f"{target} must return (train_step, state, batch), with any further "
            "arguments of the step behind the batch, or a dictionary with 'step' and "
            f"'args', and returned {_returned_kind(made)}."
        )
    step, state, *others = made
    first = state if type(state) is tuple else (state,)
    return Workload(step, (*first, *others), target, options)


def _returned_kind(made: object) -> str:
    """Describes a wrong value that a target returned."""
    if isinstance(made, tuple) and len(made) >= 3:
        return f"{_kind(made[0])} as its step"
    return _kind(made)


def _from_dictionary(
    target: str, made: dict[str, Any], options: dict[str, str]
) -> Workload:
    known = ["step", "args", "kwargs"]
    known += ["static_argnames", "batch_argnames", "frozen_argnames", "whole_argnames"]
    unknown = [str(key) for key in made if key not in known]
    if unknown or not callable(made.get("step")):
        wrong = f"{unknown[0]!r}" if unknown else "no function as 'step'"
        raise TargetError(
            f"{target} returned a dictionary with {wrong}; it may hold "
            f"{', '.join(known)}."
        )
    args, kwargs = made.get("args", ()), made.get("kwargs", {})
    check_type(f"{target}: 'args'", args, (tuple, list), "a tuple of arguments")
    check_type(f"{target}: 'kwargs'", kwargs, Mapping, "a dictionary of arguments")
    return Workload(
        made["step"],
        tuple(args),
        target,
        options,
        dict(kwargs),
        argument_names("static_argnames", made.get("static_argnames", ())),
        NamedRoles.of(
            made.get("batch_argnames"),
            made.get("frozen_argnames", ()),
            made.get("whole_argnames", ()),
        ),
    )


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """Splits ``key=value`` words.

    >>> parse_words(["layers=2", "dtype=bfloat16"])
    {'layers': '2', 'dtype': 'bfloat16'}
    """
    out: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise TargetError(f"{word!r} is not key=value. Example: layers=12.")
        if key in out:
            raise TargetError(f"{key!r} is given twice: {out[key]!r} and {value!r}.")
        out[key] = value
    return out


def find(target: str) -> Callable[..., Any]:
    """Imports the file or module of a target, and returns the function."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(
            f"{target!r} is no target: write file.py:function or module:function. "
            f"{EXAMPLE}"
        )
    module = _import_file(place) if place.endswith(".py") else _import_module(place)
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise TargetError(f"{target}: {name!r} is {_kind(function)}, not a function.")
    raise TargetError(f"{place} has no function {name!r}; it has {_functions(module)}.")


def _functions(module: types.ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    return ", ".join(sorted(names)) or "none"


def _import_file(place: str) -> types.ModuleType:
    """Imports a file, with its folder first on ``sys.path`` as for a script."""
    path = pathlib.Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"{place}: there is no such file. {EXAMPLE}")
    folder = str(path.parent)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and _file_of(loaded) == path:
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        # Registers the module as an import would: pickling and dataclasses look modules
        # up in `sys.modules`. A file must not replace a loaded module of the same name,
        # such as ``jax``.
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # the user's file may raise any exception
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        if isinstance(error, SystemExit):
            raise TargetError(_exit_text(place, error)) from error
        if not isinstance(error, Exception):
            raise
        raise TargetError(
            f"{place} cannot be imported: {describe_error(error)}"
        ) from error
    return module


def _exit_text(place: str, error: SystemExit) -> str:
    return (
        f"{place} called {_exit(error)} while it was imported: put what runs the "
        'program below `if __name__ == "__main__":`.'
    )


def _exit(error: SystemExit) -> str:
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def _file_of(module: types.ModuleType) -> pathlib.Path | None:
    file = getattr(module, "__file__", None)
    return pathlib.Path(file).resolve() if file else None


def _import_module(name: str) -> types.ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise TargetError(_exit_text(f"module {name!r}", error)) from error
    except Exception as error:  # the user's module may raise any exception
        hint = " For a file, write file.py:function." if "/" in name else ""
        raise TargetError(
            f"module {name!r} cannot be imported: {describe_error(error)}{hint}"
        ) from error


def convert(
    target: str, function: Callable[..., Any], options: dict[str, str]
) -> dict[str, Any]:
    """Converts options to the types in the annotations of the function's parameters.

    Raises:
      TargetError: a key is unknown or missing, or a value has the wrong type.
    """
    try:
        known = dict(_signature(function).parameters)
    except (TypeError, ValueError):
        return {key: guess(text) for key, text in options.items()}
    kinds = {p.kind for p in known.values()}
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds
    named = {
        key: p
        for key, p in known.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    missing = [k for k, p in named.items() if p.default is p.empty and k not in options]
    if missing:
        raise TargetError(f"{target} needs {', '.join(f'{k}=...' for k in missing)}.")
    out: dict[str, Any] = {}
    for key, text in options.items():
        if key not in named and not open_ended:
            raise TargetError(
                f"{target} has no option {key!r}; it has {_describe_options(named)}."
            )
        annotation = named[key].annotation if key in named else inspect.Parameter.empty
        out[key] = _convert_one(f"{target}: {key}={text}", annotation, text)
    return out


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # a name that only type checkers import
        return inspect.signature(function)


def _describe_options(named: dict[str, inspect.Parameter]) -> str:
    words = [
        name if p.default is p.empty else f"{name}={p.default}"
        for name, p in named.items()
    ]
    return ", ".join(words) or "no options"


def _convert_one(where: str, annotation: Any, text: str) -> Any:
    annotation = (
        _NAMES.get(annotation, annotation)
        if isinstance(annotation, str)
        else annotation
    )
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _convert_union(where, typing.get_args(annotation), text)
    if typing.get_origin(annotation) is typing.Literal:
        return _convert_literal(where, typing.get_args(annotation), text)
    if annotation is type(None) and text.lower() == "none":
        return None
    if annotation is bool:
        if text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
    elif annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            pass
    elif annotation is str:
        return text
    elif annotation is not type(None):
        return guess(text)
    raise TargetError(f"{where} is not {_KINDS[annotation]}.")


def _convert_literal(where: str, values: tuple[Any, ...], text: str) -> Any:
    for value in values:
        if str(value) == text:
            return value
    raise TargetError(f"{where} is not one of {', '.join(map(str, values))}.")


def _convert_union(where: str, kinds: tuple[Any, ...], text: str) -> Any:
    order = (type(None), bool, int, float)
    for kind in sorted(kinds, key=lambda k: order.index(k) if k in order else 4):
        try:
            return _convert_one(where, kind, text)
        except TargetError:
            continue
    names = ", ".join(getattr(k, "__name__", str(k)) for k in kinds)
    raise TargetError(f"{where} is none of {names}.")


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a value of type {type(value).__name__}"
