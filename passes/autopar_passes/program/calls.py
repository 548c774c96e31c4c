"""A call of a step: its flat arrays, and its fixed form.

The *form* of a call is everything but its arrays. Two calls with the same form and with
arrays of the same shapes run the same program. The form contains the names of the
arguments, the structure of their trees, the definitions of NNX objects, and every
static leaf.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import inspect
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax

from autopar_errors import TraceError, check_type
from autopar_passes import jax_compat
from autopar_passes.jax_meshes import UserMesh, user_mesh
from autopar_passes.program.static_leaves import (
    Fixed,
    ObjectKey,
    Static,
    holds_objects,
    module_scopes,
    name_modules,
    objects_alone,
    part,
    put_back,
    taken_out,
    unname_modules,
)

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


# The types of batch names that `NamedRoles.of` accepts.
BatchNames: TypeAlias = str | Sequence[str] | Mapping[str, int | None] | None


def argument_names(option: str, given: object) -> tuple[str, ...]:
    """Reads an option that takes the name of an argument, or several.

    Raises:
      InputTypeError: the value has another type.
    """
    names = (given,) if isinstance(given, str | bytes) else given
    wanted = "names of the step's arguments, such as 'batch'"
    check_type(f"{option}=", names, Iterable, wanted)
    found = tuple[Any, ...](cast(Iterable[Any], names))
    for name in found:
        check_type(f"{option}=", name, str, wanted)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class NamedRoles:
    """The roles that the user gives to arguments that a step does not return.

    Each name is the name of an argument, or a pattern of paths such as ``batch/*``.

    Attributes:
      batch: names of the batch, each with the dimension of its rows or None. If
        ``batch`` is None, the batch is found automatically.
      frozen: names of arguments that are the same for all rows.
      whole: names of arguments that each of several processes passes whole.
      read: names of arguments of which each of several processes reads the rows that it
        needs.
    """

    batch: tuple[tuple[str, int | None], ...] | None = None
    frozen: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        batch: BatchNames = None,
        frozen: str | Sequence[str] = (),
        whole: str | Sequence[str] = (),
    ) -> NamedRoles:
        """Reads the options ``{batch,frozen,whole}_argnames``.

        Raises:
          InputTypeError: a value is no name, or no dimension.
        """
        if batch is not None and not isinstance(batch, Mapping):
            batch = dict.fromkeys(argument_names("batch_argnames", batch))
        for name, dim in (batch or {}).items():
            argument_names("batch_argnames", (name,))
            if dim is not None:
                where, wanted = (
                    f"batch_argnames={{{name!r}: ...}}",
                    "a dimension or None",
                )
                check_type(where, dim, numbers.Integral, wanted)
        frozen = argument_names("frozen_argnames", frozen)
        whole = argument_names("whole_argnames", whole)
        return cls(None if batch is None else tuple(batch.items()), frozen, whole)

    def is_batch(self, path: str) -> bool:
        """Whether an array is named as a part of the batch."""
        return any(_names(name, path) for name, _ in self.batch or ())

    def is_batch_argument(self, name: str) -> bool:
        """Whether a whole argument is named in the batch."""
        return any(name == given for given, _ in self.batch or ())

    def is_frozen(self, path: str) -> bool:
        """Whether the user names an array frozen, or names another batch."""
        if any(_names(name, path) for name in self.frozen):
            return True
        return self.batch is not None and not self.is_batch(path)

    def is_whole(self, path: str) -> bool:
        """Whether each of several processes passes the whole array."""
        return any(_names(name, path) for name in self.whole)

    def is_at_hand(self, path: str) -> bool:
        """Whether each of several processes has all rows of an array that it needs."""
        return any(_names(name, path) for name in (*self.whole, *self.read))

    def dim_of(self, path: str) -> int | None:
        """Returns the dimension of an array's rows; None if it is not given."""
        found = (dim for name, dim in self.batch or () if _names(name, path))
        return next(found, None)

    def problem(
        self, shapes: Mapping[str, tuple[int, ...]], carried: Collection[str]
    ) -> str:
        """Describes a name without an array or with two roles; '' if there is none.

        Args:
          shapes: path -> shape of each array of the step.
          carried: paths of the arrays that the step returns with new values.
        """
        batch = [name for name, _ in self.batch or ()]
        named = [("batch_argnames", name) for name in batch]
        named += [("frozen_argnames", name) for name in self.frozen]
        named += [("whole_argnames", name) for name in self.whole]
        for option, name in named:
            found = [path for path in shapes if _names(name, path)]
            if not found:
                known = ", ".join(dict.fromkeys(p.partition("/")[0] for p in shapes))
                return f"{option}={name!r} names no array; the arguments are {known}."
            if back := [path for path in found if path in carried]:
                return (
                    f"{option}={name!r} names '{back[0]}', which comes back from the "
                    "step: it is state. Leave it out."
                )
        for path, shape in shapes.items():
            if self.is_batch(path) and any(_names(n, path) for n in self.frozen):
                return (
                    f"'{path}' is named by both batch_argnames and frozen_argnames. "
                    "Name it once."
                )
            dim = self.dim_of(path)
            if dim is not None and not 0 <= dim < len(shape):
                return (
                    f"batch_argnames says that dimension {dim} of '{path}' is its "
                    f"rows, and its shape is {shape}."
                )
        return ""


NOT_NAMED = NamedRoles()


def _names(name: str, path: str) -> bool:
    """Whether a name or a pattern of paths matches an array's path."""
    return (
        path == name or path.startswith(f"{name}/") or fnmatch.fnmatchcase(path, name)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a step, read once and used by all calls.

    Attributes:
      step: the step.
      signature: the signature of the step; None if Python cannot find it.
      names: names of the parameters that can be given by position.
      static: names of the arguments that the program contains as constants.
      roles: the roles of arguments, as the user names them.
    """

    step: Callable[..., Any]
    signature: inspect.Signature | None
    names: tuple[str, ...]
    static: frozenset[str]
    roles: NamedRoles = NOT_NAMED

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        static: Collection[str] = (),
        roles: NamedRoles = NOT_NAMED,
    ) -> Parameters:
        """Reads the signature of a step.

        Args:
          step: the step; if Python cannot find its signature, its arguments have no
            names.
          static: names of static arguments, in addition to those of ``jax.jit`` around
            the step.
          roles: the roles of arguments, as the user names them.

        Raises:
          InputTypeError: ``static`` has something else than names.
          TraceError: the step has no argument of such a name.
        """
        try:
            signature = inspect.signature(step)
        except (TypeError, ValueError):
            signature = None
        given = signature.parameters.values() if signature else ()
        names = tuple(p.name for p in given if p.kind in _POSITIONAL)
        told = jax_compat.static_argument_names(step)
        stated = frozenset(argument_names("static_argnames", static))
        if signature is not None:
            _check_names(signature, stated)
        return cls(step, signature, names, stated | told, roles)

    def positional(self, count: int) -> tuple[str, ...]:
        """The names of the first ``count`` arguments; ``args2`` if one has no name."""
        names = self.names[:count]
        return names + tuple(f"args{i}" for i in range(len(names), count))

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves arguments given by name to their positions, if they have positions.

        Raises:
          TypeError: the arguments do not fit the step.
          ValueError: Python cannot find the names of the step's arguments.
        """
        if not kwargs:
            return tuple(args), {}
        found = (self.signature or inspect.signature(self.step)).bind(*args, **kwargs)
        return found.args, dict(sorted(found.kwargs.items()))


def _check_names(signature: inspect.Signature, static: Collection[str]) -> None:
    """Checks that a step has the arguments that are named static."""
    given = signature.parameters.values()
    kinds = {p.kind for p in given}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    known = [p.name for p in given if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    unknown = sorted(set(static).difference(known))
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        unknown = [name for name in unknown if not re.fullmatch(r"args\d+", name)]
    if unknown:
        raise TraceError(
            f"static_argnames={', '.join(unknown)!r}: the step has no such argument; "
            f"it has {', '.join(known)}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """A call without its arrays; a hashable key of the program.

    Attributes:
      names: names of the arguments; the positional ones come first.
      keywords: names of the arguments that are given by keyword; they stand last in
        ``names``.
      fixed: the tuple of the arguments, with a placeholder for each array.
      objects: whether an argument contains NNX objects.
      mesh: the mesh of ``jax.set_mesh`` around the call, which the step may read.
      roles: the roles of arguments, as the user names them.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...]
    fixed: Fixed
    objects: bool
    mesh: UserMesh | None = None
    roles: NamedRoles = NOT_NAMED

    def paths(self, arrays: Sequence[Any]) -> list[str]:
        """A readable path of each array, which starts with the argument's name."""
        keyed = _array_paths(self.fixed, arrays)
        return [_text(self.names[int(path[0].idx)], path[1:]) for path in keyed]

    def argument_of(self, arrays: Sequence[Any]) -> list[int]:
        """Returns, for each array, the position of the argument that contains it."""
        return [path[0].idx for path in _array_paths(self.fixed, arrays)]


@dataclasses.dataclass(frozen=True, slots=True)
class StepCall:
    """A call of a step.

    Attributes:
      form: the fixed part of the call.
      arrays: the flat arrays or structs, in the order of the program's inputs.
    """

    form: CallForm
    arrays: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultForm:
    """The result of a step without its arrays.

    Attributes:
      fixed: a pair, without its arrays: the arguments with NNX objects (None for other
        arguments), and the step's result.
      objects: whether one of the pair contains NNX objects.
    """

    fixed: Fixed
    objects: bool

    def paths(self, names: Sequence[str], arrays: Sequence[Any]) -> list[str]:
        """A readable path of each array: ``result/...``, or the path of an argument."""
        found: list[str] = []
        for path in _array_paths(self.fixed, arrays):
            if path[0].idx == 0:
                found.append(_text(names[int(path[1].idx)], path[2:]))
            else:
                found.append(_text("result", path[1:]))
        return found

    def return_value(self, arrays: Sequence[Any]) -> Any:
        """Returns the step's result and updates the caller's NNX objects.

        Call it within `static_leaves.updating`.
        """
        tree = self.fixed.join(arrays)
        if self.objects:
            tree = put_back(tree, inner=False)
        return tree[1]


def open_call(
    parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> StepCall:
    """Takes the arrays out of a call. Call it within `static_leaves.updating`.

    Arguments given by name move to their positions, if they have positions. The
    parameters state which arguments are static. A whole argument that is a ``bool``,
    text or an enumeration member is static too.

    Args:
      parameters: the parameters of the step.
      args: positional arguments.
      kwargs: arguments by name.

    Raises:
      TypeError: the arguments do not fit the step's signature, or an argument contains
        a leaf that is neither an array nor can be static.
    """
    positional, keyword = parameters.bind(args, kwargs or {})
    names = (*parameters.positional(len(positional)), *keyword)
    values = [
        Static(x) if _is_flag(x) or name in parameters.static else x
        for name, x in zip(names, (*positional, *keyword.values()), strict=True)
    ]
    objects = holds_objects(values)
    trees = taken_out(tuple(values)) if objects else tuple(values)
    arrays, fixed = part(names, trees)
    mesh, roles = user_mesh(), parameters.roles
    form = CallForm(names, tuple(keyword), fixed, objects, mesh, roles)
    return StepCall(form, arrays)


def _is_flag(x: Any) -> bool:
    return isinstance(x, (bool, str, enum.Enum))


def flat_function(
    step: Callable[..., Any], form: CallForm
) -> tuple[Callable[..., list[Any]], list[ResultForm]]:
    """Returns the step as a function of its flat arrays.

    Call it within `static_leaves.updating`.

    Also returns an empty list, to which each trace of the function appends the form of
    the result.
    """
    results: list[ResultForm] = []

    def flat(*arrays: Any) -> list[Any]:
        trees = form.fixed.join(arrays)
        values = put_back(trees, inner=True) if form.objects else trees
        out = _run(step, form, values)
        kept = objects_alone(values) if form.objects else ()
        objects = form.objects or holds_objects(out)
        pair = taken_out((kept, out)) if objects else (kept, out)
        found, fixed = part(("arguments", "result"), pair)
        results.append(ResultForm(fixed, objects))
        return found

    return flat, results


def _run(step: Callable[..., Any], form: CallForm, values: Sequence[Any]) -> Any:
    values = [x.value if isinstance(x, Static) else x for x in values]
    count = len(values) - len(form.keywords)
    keyword = dict(zip(form.keywords, values[count:], strict=True))
    if not form.objects:
        return step(*values[:count], **keyword)
    nodes = tuple(x for x in values if holds_objects(x))
    name_modules(nodes)
    with module_scopes(nodes):
        out = step(*values[:count], **keyword)
    unname_modules((nodes, out))
    return out


def _array_paths(fixed: Fixed, arrays: Sequence[Any]) -> list[Any]:
    """Returns the path of each array."""
    static = {k for k, _ in fixed.leaves}
    keyed, _ = fixed.read(arrays, jax.tree_util.tree_flatten_with_path)
    return [path for k, (path, _) in enumerate(keyed) if k not in static]


def _text(name: str, path: Sequence[Any]) -> str:
    keys = tuple(k for k in path if not isinstance(k, ObjectKey))
    rest = jax.tree_util.keystr(keys, simple=True, separator="/")
    return "/".join(x for x in (name, rest) if x)
