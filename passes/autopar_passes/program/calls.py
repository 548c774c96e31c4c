"""A call of a step: its arguments as flat arrays, and the form that stays fixed.

Two calls of one form and of arrays of the same shapes run the same program. The form
holds the names of the arguments, the structure of their trees, what NNX objects are,
and every static leaf.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.program.nnx_objects import (
    ObjectKey,
    holds_objects,
    objects_alone,
    put_back,
    taken_out,
)
from autopar_passes.program.nnx_scopes import (
    module_scopes,
    name_modules,
    unname_modules,
)
from autopar_passes.program.static_leaves import Fixed, Static, part


@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """What a call is without its arrays; hashable.

    Attributes:
      names: of the arguments; the positional ones come first.
      keywords: names of the arguments that are given by keyword, the last ones.
      fixed: the tuple of the arguments without their arrays.
      objects: whether an argument holds NNX objects.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...]
    fixed: Fixed
    objects: bool

    def paths(self, arrays: Sequence[Any]) -> list[str]:
        """A readable path of each array, which starts with the argument's name."""
        keyed = _keyed(self.fixed, arrays)
        return [_text(self.names[int(path[0].idx)], path[1:]) for path in keyed]

    def argument_of(self, arrays: Sequence[Any]) -> list[int]:
        """Of each array, the position of the argument that holds it."""
        return [path[0].idx for path in _keyed(self.fixed, arrays)]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of a step.

    Attributes:
      form: what stays fixed.
      arrays: the flat arrays or structs, in the order of the program's inputs.
    """

    form: CallForm
    arrays: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultForm:
    """What a step returns, without its arrays.

    Attributes:
      fixed: the pair of the arguments' NNX objects (None for other arguments) and the
        step's result, without their arrays.
      objects: whether either holds NNX objects.
    """

    fixed: Fixed
    objects: bool

    def paths(self, names: Sequence[str], arrays: Sequence[Any]) -> list[str]:
        """A readable path of each array: ``result/...``, or that of an argument."""
        found: list[str] = []
        for path in _keyed(self.fixed, arrays):
            if path[0].idx == 0:
                found.append(_text(names[int(path[1].idx)], path[2:]))
            else:
                found.append(_text("result", path[1:]))
        return found

    def returned(self, arrays: Sequence[Any]) -> Any:
        """What the step returns, its NNX objects updated; within `updating`."""
        tree = self.fixed.join(arrays)
        if self.objects:
            tree = put_back(tree, inner=False)
        return tree[1]


def open_call(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static: Collection[str] = (),
) -> Call:
    """Takes the arrays out of a call; within `updating`.

    Arguments given by name take their places where they have one. What is named in
    ``static``, what ``jax.jit`` around the step was told is static, and whole
    arguments that are a ``bool``, text or a member of an enumeration are static.

    Args:
      step: the step.
      args: positional arguments.
      kwargs: arguments by name.
      static: names of further static arguments.

    Raises:
      TypeError: the arguments do not fit the step's signature, or one of them holds
        something that is neither an array nor can be static.
    """
    positional, keyword = _bound(step, args, dict(kwargs or {}))
    names = (*argument_names(step, positional), *keyword)
    fixed_names = frozenset(static) | jax_compat.static_argument_names(step)
    values = [
        Static(x) if _is_flag(x) or name in fixed_names else x
        for name, x in zip(names, (*positional, *keyword.values()), strict=True)
    ]
    objects = holds_objects(values)
    trees = taken_out(tuple(values)) if objects else tuple(values)
    arrays, fixed = part(names, trees)
    return Call(CallForm(tuple(names), tuple(keyword), fixed, objects), arrays)


def _is_flag(x: Any) -> bool:
    return isinstance(x, (bool, str, enum.Enum))


def _bound(
    step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts arguments given by name in their places where they have one."""
    if not kwargs:
        return tuple(args), {}
    bound = inspect.signature(step).bind(*args, **kwargs)
    return bound.args, dict(sorted(bound.kwargs.items()))


def flat_function(
    step: Callable[..., Any], form: CallForm
) -> tuple[Callable[..., list[Any]], list[ResultForm]]:
    """Returns the step as a function of its flat arrays, within `updating`.

    Also returns a list that takes up the form of the result when it is traced.
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


def argument_names(step: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Returns the step's own names of its arguments; ``args2`` for those without."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][: len(args)]
    return names + [f"args{i}" for i in range(len(names), len(args))]


def _keyed(fixed: Fixed, arrays: Sequence[Any]) -> list[Any]:
    """The path of each array."""
    static = {k for k, _ in fixed.leaves}
    keyed, _ = fixed.read(arrays, jax.tree_util.tree_flatten_with_path)
    return [path for k, (path, _) in enumerate(keyed) if k not in static]


def _text(name: str, path: Sequence[Any]) -> str:
    keys = tuple(k for k in path if not isinstance(k, ObjectKey))
    rest = jax.tree_util.keystr(keys, simple=True, separator="/")
    return "/".join(x for x in (name, rest) if x)
