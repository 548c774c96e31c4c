"""Traces a user's train step, in any of the common forms.

* Linen: ``step(state, batch) -> (state, metrics)`` with a ``TrainState``;
* plain: ``step(params, opt_state, batch) -> (params, opt_state, loss)``;
* NNX: ``step(model, optimizer, metrics, batch) -> loss``, which updates its arguments;
* Equinox: ``step(model, opt_state, batch) -> (model, opt_state, loss)``.

Tracing needs only shapes, so no memory of the model's size is allocated.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from autopar_errors import TraceError, user_line
from autopar_passes import jax_compat, jax_meshes
from autopar_passes.program.calls import (
    NOT_NAMED,
    CallForm,
    NamedRoles,
    Parameters,
    ResultForm,
    StepCall,
    flat_function,
    open_call,
)
from autopar_passes.program.equal_leaves import stacked_leaves
from autopar_passes.program.equations import Program
from autopar_passes.program.flatten import flatten, with_one_replica
from autopar_passes.program.static_leaves import (
    Fixed,
    is_object_state,
    struct_of,
    updating,
)

# Finds the state that a step carries: arguments whose next values are in the result.
#
# A whole argument is matched with a part of the result that has the same structure,
# shapes and dtypes. The part may be the result itself, an element of a tuple, a value
# of a dict or a field of a dataclass. NNX objects are matched array by array, because a
# step may add or remove variables. A scalar argument, such as a learning rate, is
# matched only if the result depends on it; otherwise a loss could be mistaken for its
# next value. An argument that the user names as batch is never state.


@dataclasses.dataclass(frozen=True, slots=True)
class CarriedPairs:
    """The arguments that a step carries.

    Attributes:
      pairs: flat argument -> flat result that is its next value.
      changed: paths of the arrays of carried arguments that come back with another
        shape or dtype.
    """

    pairs: dict[int, int]
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """An array of a tree: its number, and the type that a carried array must keep."""

    index: int
    kind: tuple[Any, ...]


# The carried pairs, and the paths of arguments that come back with another shape or
# dtype.
_Found = tuple[dict[int, int], set[int]]
# Path and array of every leaf of NNX objects.
_ObjectArrays = Iterator[tuple[Any, _Leaf]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tree.

    Attributes:
      name: the key of the part in its tree, or the name of an argument; empty for an
        element of a sequence.
      depth: the number of trees around the part.
      tree: the part.
      numbers: ``id`` of a leaf that represents an array -> the array.
      structure: the structure of the part's tree.
      leaves: the leaves of the part, with arrays as `_Leaf`.
    """

    name: str
    depth: int
    tree: Any
    numbers: Mapping[int, _Leaf]
    structure: Any
    leaves: tuple[Any, ...]

    @property
    def arrays(self) -> list[_Leaf]:
        """The arrays of the part."""
        return [x for x in self.leaves if isinstance(x, _Leaf)]

    @property
    def is_array(self) -> bool:
        """Whether the part is a single array."""
        return len(self.leaves) == 1 and jax.tree_util.treedef_is_leaf(self.structure)


def find_carried(
    form: CallForm,
    inputs: Sequence[Any],
    result: ResultForm,
    outputs: Sequence[Any],
    depends: Callable[[int, int], bool],
) -> CarriedPairs:
    """Matches the arguments of a call with its result.

    Args:
      form: the form of the call.
      inputs: shapes and dtypes of the flat arguments.
      result: the form of the result.
      outputs: shapes and dtypes of the flat results.
      depends: a function that returns whether a flat result depends on a flat argument.
    """

    def both(given: Any) -> _Found:
        return result.fixed.read(outputs, lambda after: search_pairs(given, after))

    def search_pairs(given: Any, after: Any) -> _Found:
        before = _leaves_by_id(form.fixed, given, inputs)
        numbers = _leaves_by_id(result.fixed, after, outputs)
        objects, returned = after
        search = _PairSearch(_part("", 0, returned, numbers), depends)
        for k, (name, tree) in enumerate(zip(form.names, given, strict=True)):
            if form.roles.is_batch_argument(name):
                continue
            if form.objects:
                search.objects(
                    _object_arrays(tree, before), _object_arrays(objects[k], numbers)
                )
            search.match(_part(name, 0, tree, before))
        return search.pairs, search.changed

    pairs, changed = form.fixed.read(inputs, both)
    paths = form.paths(inputs)
    return CarriedPairs(
        dict(sorted(pairs.items())), tuple(paths[i] for i in sorted(changed))
    )


class _PairSearch:
    """Matches parts of arguments with parts of one result."""

    def __init__(self, result: _Part, depends: Callable[[int, int], bool]) -> None:
        """Starts without matches."""
        self._depends = depends
        self.pairs: dict[int, int] = {}
        self.changed: set[int] = set()
        self._taken: set[int] = set()
        # The parts of the result by their structure, each part before the parts inside
        # it.
        self._parts: dict[Any, list[_Part]] = collections.defaultdict(list)
        for part in _parts(result):
            self._parts[part.structure].append(part)

    def objects(self, before: _ObjectArrays, after: _ObjectArrays) -> None:
        """Matches the NNX arrays of an argument with the result's, by their paths."""
        new = dict(after)
        for path, leaf in before:
            other = new.get(path)
            if isinstance(other, _Leaf) and other.kind == leaf.kind:
                self.pairs[leaf.index] = other.index

    def match(self, part: _Part) -> bool:
        """Matches a part of an argument, or else the parts inside it."""
        if not part.arrays or is_object_state(part.tree):
            return False
        found = self._equal(part) or self._alike(part)
        if found is not None:
            self._take(part, found)
            return True
        if part.is_array:
            return False
        children = _children(part)
        inner = [x for x in children if not x.is_array]
        matched = [self.match(x) for x in inner]
        if any(matched):
            # An array in the same container as matched state may be state too, if an
            # array of the result has the same name.
            for x in children:
                if x.is_array:
                    self.match(x)
        return any(matched)

    def _equal(self, part: _Part) -> _Part | None:
        """A part of the result with the argument's structure and array types."""
        found = [x for x in self._free(part) if _kinds(x) == _kinds(part)]
        if part.is_array:
            found = [x for x in found if self._may_be(part, x)]
        named = [x for x in found if x.name and x.name == part.name]
        return next(iter(named + found), None)

    def _may_be(self, part: _Part, other: _Part) -> bool:
        """Whether a single array of the result may be the argument's next value.

        Many arrays have the same shape, so the names must be equal. An argument that is
        itself an array is an exception: it may match the result itself, or an element
        of a tuple.
        """
        if part.depth == 0 and other.depth <= 1 and not other.name:
            (own,), (new,) = part.arrays, other.arrays
            return own.kind[0] != () or self._depends(own.index, new.index)
        return bool(part.name) and other.name == part.name

    def _alike(self, part: _Part) -> _Part | None:
        """A part of the result, most of whose arrays have the argument's types."""
        for other in self._free(part):
            equal = sum(
                a == b for a, b in zip(_kinds(part), _kinds(other), strict=True)
            )
            if not part.is_array and 2 * equal >= len(part.leaves) and equal > 0:
                return other
        return None

    def _free(self, part: _Part) -> Iterator[_Part]:
        for other in self._parts.get(part.structure, ()):
            if self._taken.isdisjoint(x.index for x in other.arrays):
                yield other

    def _take(self, part: _Part, other: _Part) -> None:
        self._taken.update(x.index for x in other.arrays)
        for a, b in zip(part.leaves, other.leaves, strict=True):
            if isinstance(a, _Leaf) and isinstance(b, _Leaf) and a.kind == b.kind:
                self.pairs[a.index] = b.index
            elif isinstance(a, _Leaf):
                self.changed.add(a.index)


def _kinds(part: _Part) -> list[Any]:
    return [x.kind if isinstance(x, _Leaf) else ("static", x) for x in part.leaves]


def _leaves_by_id(fixed: Fixed, tree: Any, arrays: Sequence[Any]) -> dict[int, _Leaf]:
    """``id`` of each leaf that represents an array -> the array."""
    static = {k for k, _ in fixed.leaves}
    held = [x for k, x in enumerate(jax.tree.leaves(tree)) if k not in static]
    return {
        id(x): _Leaf(k, (tuple(struct.shape), str(struct.dtype)))
        for k, (x, struct) in enumerate(zip(held, arrays, strict=True))
    }


def _part(name: str, depth: int, tree: Any, numbers: Mapping[int, _Leaf]) -> _Part:
    held, structure = jax.tree.flatten(tree)
    leaves = tuple(numbers.get(id(x), x) for x in held)
    return _Part(name, depth, tree, numbers, structure, leaves)


def _children(part: _Part) -> list[_Part]:
    tree = part.tree
    keyed, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    return [
        _part(_name(path), part.depth + 1, child, part.numbers) for path, child in keyed
    ]


def _name(path: Any) -> str:
    if isinstance(path[-1], jax.tree_util.SequenceKey):
        return ""
    return jax.tree_util.keystr(path, simple=True)


def _parts(part: _Part) -> Iterator[_Part]:
    """Yields a tree and its parts, each part before the parts inside it."""
    queue = collections.deque([part])
    while queue:
        part = queue.popleft()
        yield part
        if not part.is_array and part.leaves:
            queue.extend(_children(part))


def _object_arrays(tree: Any, numbers: Mapping[int, _Leaf]) -> _ObjectArrays:
    """Yields the path and the array of every leaf of NNX objects in a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object_state)
    for path, held in keyed:
        if is_object_state(held):
            inner, _ = jax.tree_util.tree_flatten_with_path(held)
            known = ((path + more, numbers.get(id(x))) for more, x in inner)
            yield from ((at, leaf) for at, leaf in known if leaf is not None)


# JAX's errors for mistakes in a step.
_ERRORS = (
    jax.errors.JAXTypeError,
    jax.errors.JAXIndexError,
    TypeError,
    jax_meshes.ShardingTypeError,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a pure, flat program, and the mapping from calls to the program.

    Attributes:
      name: the name of the step, as messages and reports show it.
      program: the flat program.
      form: the fixed part of the call.
      result: the fixed part of the result.
      input_paths: a readable path for each flat argument.
      output_paths: a readable path for each flat result.
      carried: flat argument -> flat result that is its next value.
      changed: paths of the arrays of carried arguments that come back with another
        shape or dtype.
      replicas: names of the axes over which the step has collectives, as under
        ``jax.pmap``. Each axis has size one in the program, which sees the whole batch.
      loop: index of the equation that loops over microbatches
        (`autopar_passes.microbatches.accumulate`); None if the program has no such
        equation.
    """

    name: str
    program: Program
    form: CallForm
    result: ResultForm
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    carried: dict[int, int]
    changed: tuple[str, ...]
    replicas: frozenset[str]
    loop: int | None = None


def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static: Collection[str] = (),
    roles: NamedRoles = NOT_NAMED,
) -> TracedStep:
    """Traces a step on arrays or ``ShapeDtypeStruct``s.

    Args:
      step: the step.
      args: the arguments of the step.
      kwargs: arguments by name.
      static: names of arguments that are part of the program.
      roles: the roles of arguments, as the user names them.

    Raises:
      TraceError: JAX cannot trace the step.
    """
    return trace_call(step, open_arguments(step, args, kwargs, static, roles))


def open_arguments(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static: Collection[str] = (),
    roles: NamedRoles = NOT_NAMED,
) -> StepCall:
    """Takes the arrays out of a call that is only traced: no NNX object is updated.

    Args:
      step: the step.
      args: the arguments of the step.
      kwargs: arguments by name.
      static: names of arguments that are part of the program.
      roles: the roles of arguments, as the user names them.

    Raises:
      TraceError: the arguments do not fit the step, or JAX does not accept them.
    """
    with updating():
        return opened_within(Parameters.of(step, static, roles), args, kwargs)


def opened_within(
    parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> StepCall:
    """Takes the arrays out of a call (`autopar_passes.program.calls.open_call`).

    Use within `updating`, which the caller opens to put new arrays back.

    Args:
      parameters: the parameters of the step.
      args: the arguments of the step.
      kwargs: arguments by name.

    Raises:
      TraceError: the arguments do not fit the step, or JAX does not accept them.
    """
    try:
        return open_call(parameters, args, kwargs)
    except TypeError as error:
        raise TraceError(_call_failure(parameters.step, error)) from error


def trace_call(
    step: Callable[..., Any], call: StepCall, *, checkpoints: bool = True
) -> TracedStep:
    """Traces a step on the arrays or structs of a call.

    A carried array may be weakly typed in the first call and strongly typed when it
    comes back. Such an array is traced as strongly typed, so that the second call runs
    the program of the first call.

    Args:
      step: the step.
      call: a call of the step.
      checkpoints: whether a barrier separates the equations that ``jax.checkpoint``
        repeats from the forward pass.

    Raises:
      TraceError: JAX cannot trace the step.
    """
    found = _trace_step(step, call.form, [struct_of(x) for x in call.arrays])
    weak = [a for a in found.carried.pairs if found.inputs[a].weak_type]
    if not all(found.outputs[found.carried.pairs[a]].weak_type for a in weak):
        strong = [
            x.update(weak_type=False) if k in weak else x
            for k, x in enumerate(found.inputs)
        ]
        found = _trace_step(step, call.form, strong)
    paths = tuple(call.form.paths(found.inputs))
    if call.form.roles != NOT_NAMED:
        shapes = {p: tuple(x.shape) for p, x in zip(paths, found.inputs, strict=True)}
        back = {paths[k] for k in found.carried.pairs}
        if problem := call.form.roles.problem(shapes, back):
            raise TraceError(f"{step_name(step)}: {problem}")
    return TracedStep(
        name=step_name(step),
        program=stacked_leaves(
            flatten(found.jaxpr, found.replicas, checkpoints=checkpoints)
        ),
        form=call.form,
        result=found.result,
        input_paths=paths,
        output_paths=tuple(found.result.paths(call.form.names, found.outputs)),
        carried=found.carried.pairs,
        changed=found.carried.changed,
        replicas=found.replicas,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """One trace of a step.

    Attributes:
      jaxpr: the closed jaxpr.
      inputs: structs of the flat arguments.
      outputs: shapes and dtypes of the flat results.
      result: the form of the result.
      carried: the arguments that the step returns with new values.
      replicas: names of the axes that the step uses as axes of replicas.
    """

    jaxpr: Any
    inputs: list[Any]
    outputs: list[Any]
    result: ResultForm
    carried: CarriedPairs
    replicas: frozenset[str]


def _trace_step(step: Callable[..., Any], form: CallForm, inputs: list[Any]) -> _Traced:
    """Traces a step."""
    if jax_compat.is_pmapped(step):
        raise TraceError(
            f"the step '{step_name(step)}' is a jax.pmap: pass the function itself. "
            "Collectives over its axis may stay; a planned step sees the whole batch."
        )
    explicit = [jax_meshes.explicit_sharding(x) for x in inputs]
    with updating():
        flat, results = flat_function(step, form)
        typed = [jax_meshes.on_mesh(x, form.mesh) for x in inputs]
        try:
            with jax_meshes.enter_mesh(form.mesh):
                traced, replicas = with_one_replica(lambda: _jaxpr(step, flat, typed))
        except (ValueError, NotImplementedError) as error:
            if form.mesh is None and not any(explicit):
                raise
            # JAX cannot trace some operators, such as ``ragged_dot``, on types that
            # contain a sharding. The plan places arrays, so these shardings are not
            # needed, and a step that names no mesh is traced without one. A shard_map
            # without ``jax.set_mesh`` is an exception: only the shardings in the types
            # name its mesh.
            other = inputs
            if form.mesh is not None:
                other = [jax_meshes.on_mesh(x, None) for x in inputs]
            try:
                traced, replicas = with_one_replica(lambda: _jaxpr(step, flat, other))
            except (ValueError, TypeError, NotImplementedError):
                raise TraceError(_trace_failure(step, error)) from error
    outputs = list(traced.out_info)
    jaxpr = traced.jaxpr

    @functools.cache
    def read_by(output: int) -> list[bool]:
        """Returns, for each argument, whether an output depends on it."""
        used = [k == output for k in range(len(outputs))]
        return partial_eval.dce_jaxpr(jaxpr.jaxpr, used)[1]

    carried = find_carried(
        form, inputs, results[-1], outputs, lambda k, output: read_by(output)[k]
    )
    if form.mesh is not None or any(explicit):
        jaxpr = jax_meshes.drop_shardings(jaxpr)
    return _Traced(jaxpr, inputs, outputs, results[-1], carried, replicas)


def _jaxpr(
    step: Callable[..., Any], flat: Callable[..., Any], inputs: list[Any]
) -> Any:
    try:
        with jax_compat.without_devices():
            return jax.jit(flat).trace(*inputs)
    except _ERRORS as error:
        raise TraceError(_trace_failure(step, error)) from error


def step_name(step: Callable[..., Any]) -> str:
    """Returns the name of a step: the name of its function or of its class."""
    step = step.func if isinstance(step, functools.partial) else step
    return getattr(step, "__name__", type(step).__name__)


def _call_failure(step: Callable[..., Any], error: Exception) -> str:
    name = step_name(step)
    return f"the step '{name}' cannot be called like this: {error}"


def _trace_failure(step: Callable[..., Any], error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    name = step_name(step)
    first = str(error).strip().split("\n", 1)[0].rstrip(".")
    where = pathlib.PurePath(user_line(error)).name
    place = f" ({where})" if where else ""
    return (
        f"the step '{name}' cannot be traced: {first}{place}.\n"
        "  A planned step must be a function that jax.jit accepts: pytrees of arrays "
        "in and out, no Python control flow on array values, no conversion of arrays "
        "to Python numbers.\n"
        f"  try: jax.jit({name}).trace(...) on the same arguments shows where."
    )
