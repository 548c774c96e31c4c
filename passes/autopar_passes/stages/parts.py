"""Assigns every top-level equation of a microbatch's program to a pipeline part.

Forward equations are cut where the parts start. The backward pass goes through the
parts in reverse. A backward equation may run in no later part than the gradients that
it reads; of these parts it runs in the latest one that holds the forward values that it
reads. If its result is larger than the gradients that it reads, and no equation of that
part reads the result, it runs in the earliest part possible: so the gradients are sent,
and not a copy of them for each row or position. An update runs in the part that holds
its state. Scalars of several parts, such
as the norm of all gradients, are summed in the first part.

The module also moves sums of gradients over stages out of the microbatches. If layers
of several stages use a parameter, such as a tied embedding, the parameter's gradient is
a sum over stages. The sum over microbatches can be computed first, so that each stage
sends its part once per step instead of once per microbatch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.graph.operators import GraphInput, OperatorGraph, update_equations
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.microbatches.facts import Combine, Crossing, Microbatched
from autopar_passes.program.equations import Equation, Program, Value, reads
from autopar_passes.sums.stacked import ADDITIONS, UNARY

# The dependencies of the top-level equations of a microbatch's program.
#
# An equation that depends on both state and batch runs in one part of a pipeline. An
# equation that depends on at most one of them is *free*: it runs in every pipeline part
# that reads its results. Cast weights and masks are therefore never sent.


# Arrays with at most this many elements are sent to every part that reads them:
# counters, keys, learning rates and loss scales.
SMALL = 16
# A free equation runs only in the part that holds its state if its results have at most
# this fraction of the bytes of that state. So, for example, the sum of squares of
# weights is sent to other parts, not the weights.
REDUCING = 1 / 8


@dataclasses.dataclass(frozen=True)
class Flow:
    """Makers, readers and dependencies of the values of a program.

    Attributes:
      program: one microbatch's program.
      graph: the operator graph of the program.
      batch: the input values that are split into microbatches.
      once: indices of the equations that run once, after all microbatches.
    """

    program: Program
    graph: OperatorGraph
    batch: frozenset[int]
    once: frozenset[int]

    @functools.cached_property
    def equations(self) -> dict[int, Equation]:
        """The top-level equations by index, in program order."""
        return {eqn.index: eqn for eqn in self.program.body.equations}

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """Value -> the top-level equation that computes it."""
        return {v: e.index for e in self.equations.values() for v in e.outputs}

    @functools.cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Value -> the top-level equations that read it, in program order."""
        found: dict[int, dict[int, None]] = {}
        for eqn in self.equations.values():
            for value in reads(eqn):
                found.setdefault(value, {})[eqn.index] = None
        return {value: tuple(known) for value, known in found.items()}

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """Equation -> its role: that of the operator that computes its first result.

        There are four exceptions. An equation that runs once belongs to the update. An
        equation that each microbatch runs on its rows never belongs to the update, even
        if the graph gives it this role. An example is a gradient times a loss scale. A
        gradient that the loss depends on belongs to the forward pass, as in the steps
        of an inner optimizer. An equation whose result a microbatch reads is run for
        the microbatch, for example a part of the state that the microbatch adds to.
        """
        made = {v: op.role for op in self.graph.operators for v in op.outputs}
        roles = {op.equation: op.role for op in self.graph.operators}
        out: dict[int, Role] = {}
        for index, eqn in self.equations.items():
            if index in self.once:
                out[index] = Role.UPDATE
                continue
            role = roles.get(index, Role.FORWARD)
            if eqn.outputs:
                role = made.get(eqn.outputs[0], Role.FORWARD)
            late = role is Role.UPDATE and index in self.of_rows
            out[index] = Role.BACKWARD if late else role
        for index, eqn in reversed(self.equations.items()):
            read = {out[r] for v in eqn.outputs for r in self.readers.get(v, ())}
            once = index in self.once or out[index] is not Role.UPDATE
            if out[index] is not Role.FORWARD and Role.FORWARD in read:
                out[index] = Role.FORWARD
            elif not once and Role.BACKWARD in read:
                out[index] = Role.BACKWARD
        return out

    @functools.cached_property
    def of_rows(self) -> frozenset[int]:
        """The equations that depend on the rows of each microbatch."""
        known, out = set(self.batch), set[int]()
        for index, eqn in self.equations.items():
            if index not in self.once and not known.isdisjoint(reads(eqn)):
                out.add(index)
                known.update(eqn.outputs)
        return frozenset(out)

    @functools.cached_property
    def modules(self) -> dict[int, str]:
        """Equation -> its module path; '' if it is unknown."""
        return {op.equation: op.module for op in self.graph.operators}

    @functools.cached_property
    def state(self) -> frozenset[int]:
        """The inputs that only one part holds: parameters, moments, and large inputs.

        Counters, keys, learning rates and loss scales are sent to all parts that read
        them.
        """
        return frozenset(g.value for g in self.graph.inputs if self._is_held(g))

    def _is_held(self, given: GraphInput) -> bool:
        match given.role:
            case InputRole.BATCH:
                return False
            case InputRole.PARAMETER:
                return True
            case InputRole.OPTIMIZER_STATE:
                return self.value(given.value).size > 1
            case _:
                return given.rows < 0 and not self.small(given.value)

    @functools.cached_property
    def carried_values(self) -> dict[int, int]:
        """State input -> its next value."""
        outputs = self.program.body.outputs
        return {
            given.value: out
            for given in self.graph.inputs
            if given.output >= 0 and isinstance(out := outputs[given.output], int)
        }

    def value(self, number: int) -> Value:
        """Returns the shape and dtype of a value."""
        return self.program.values[number]

    def small(self, number: int) -> bool:
        """Whether a value is small enough to be sent to every reader."""
        value = self.value(number)
        return value.size <= SMALL or jax_compat.is_extended(value.dtype)

    @functools.cached_property
    def free(self) -> frozenset[int]:
        """The equations that depend on the state or on the batch, but not on both.

        An equation after the backward pass is free only if it reads nothing but small
        inputs.
        """
        depends = {
            v: frozenset(
                kind
                for kind, among in (("state", self.state), ("batch", self.batch))
                if v in among
            )
            for v in self.program.body.inputs
        }
        out: set[int] = set()
        for index, eqn in self.equations.items():
            found = frozenset[str]().union(*(depends[v] for v in reads(eqn)))
            if self.roles[index] is Role.UPDATE and found:
                found = frozenset({"state", "batch"})
            if len(found) < 2 and not eqn.source.effects:
                out.add(index)
            depends.update(dict.fromkeys(eqn.outputs, found))
        return frozenset(out)

    @functools.cached_property
    def of_state(self) -> dict[int, frozenset[int]]:
        """Maps the value of an input or free equation to the state that it reads."""
        found = {
            v: frozenset({v}) if v in self.state else frozenset[int]()
            for v in self.program.body.inputs
        }
        for index, eqn in self.equations.items():
            if index in self.free:
                made = frozenset[int]().union(
                    *(found.get(v, frozenset()) for v in reads(eqn))
                )
                found.update(dict.fromkeys(eqn.outputs, made))
        return found

    @functools.cached_property
    def reducing(self) -> frozenset[int]:
        """Free equations whose results are much smaller than the state they read."""
        out: set[int] = set()
        for index in self.free:
            eqn = self.equations[index]
            held = [v for v in reads(eqn) if self.of_state[v] and not self.small(v)]
            made = sum(self.value(v).nbytes for v in eqn.outputs)
            if held and made <= REDUCING * sum(self.value(v).nbytes for v in held):
                out.add(index)
        return frozenset(out)


class CutError(InputError):
    """A program cannot be cut in the requested way."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The part of each top-level equation.

    Attributes:
      flow: the dependencies between equations.
      count: the number of parts.
      part: equation -> its part, for all equations that run in one part.
      homes: state input -> the part that holds it between steps.
      gathered: maps an input that holds the rows of all microbatches to the value of
        one microbatch from which it is put together.
    """

    flow: Flow
    count: int
    part: dict[int, int]
    homes: dict[int, int]
    gathered: Mapping[int, int]


def parts_of(
    program: Program,
    graph: OperatorGraph,
    starts: Sequence[int],
    *,
    batch: Collection[int],
    once: Collection[int] | None = None,
    gathered: Mapping[int, int] | None = None,
) -> Parts:
    """Gives every top-level equation its part.

    Args:
      program: one microbatch's program.
      graph: the operator graph of the program.
      starts: indices of the forward equations at which parts begin, ascending. Earlier
        equations belong to the first part.
      batch: input values that are split into microbatches.
      once: indices of the equations that run once, after all microbatches; None for the
        equations of the update.
      gathered: see `Parts`.

    Raises:
      CutError: parts do not begin at different top-level equations.
    """
    if once is None:
        once = update_equations(program, graph)
    flow = Flow(program, graph, frozenset(batch), frozenset(once))
    if not starts or list(starts) != sorted(set(starts)):
        raise CutError(f"parts must begin at different equations, got {list(starts)}.")
    if missing := [s for s in starts if s not in flow.equations]:
        raise CutError(f"no equation of the top level has the index {missing[0]}.")
    return _Placer(flow, starts, gathered or {}).run()


class _Placer:
    """Assigns equations to parts: first forward, then backward, then update."""

    def __init__(
        self, flow: Flow, starts: Sequence[int], gathered: Mapping[int, int]
    ) -> None:
        self.flow = flow
        self.gathered = gathered
        self.starts = starts
        self.part: dict[int, int] = {}
        # State -> the parts whose forward equations read it.
        self.held: dict[int, set[int]] = defaultdict(set)
        # Value -> the parts of the equations that compute or read it, so far.
        self.known: dict[int, set[int]] = defaultdict(set)
        self.homes: dict[int, int] = {}

    def run(self) -> Parts:
        self.forward()
        self.place_at_state()
        self.backward()
        self.homes.update({v: min(parts) for v, parts in self.held.items()})
        # An array with the rows of all microbatches is joined in the part that computes
        # the rows. If free equations compute the rows, the array is joined in the last
        # part.
        for value, crossing in self.gathered.items():
            maker = self.flow.maker[crossing]
            self.homes[value] = self.part.get(maker, len(self.starts) - 1)
        self.update()
        return Parts(self.flow, len(self.starts), self.part, self.homes, self.gathered)

    def of_role(self, role: Role) -> list[int]:
        """Returns the equations of a role that run in exactly one part."""
        flow = self.flow
        return [
            i for i in flow.equations if flow.roles[i] is role and i not in flow.free
        ]

    def place_equation(self, index: int, part: int) -> None:
        """Assigns an equation to a part."""
        self.part[index] = part
        eqn = self.flow.equations[index]
        for value in (*reads(eqn), *eqn.outputs):
            self.known[value].add(part)

    def forward(self) -> None:
        flow = self.flow
        order = {index: place for place, index in enumerate(flow.equations)}
        begins = [order[s] for s in self.starts]
        for index in self.of_role(Role.FORWARD):
            part = max(0, bisect.bisect_right(begins, order[index]) - 1)
            self.place_equation(index, part)
            for value in reads(flow.equations[index]):
                for given in self.state_behind(value):
                    self.held[given].add(part)

    def state_behind(self, value: int) -> frozenset[int]:
        """Returns the state from which a reader can recompute a free value."""
        flow = self.flow
        maker = flow.maker.get(value)
        if maker is None or (maker in flow.free and maker not in flow.reducing):
            return flow.of_state.get(value, frozenset())
        return frozenset()

    def place_at_state(self) -> None:
        """Assigns free equations that reduce state much to the part with the state."""
        flow = self.flow
        for index in flow.equations:
            if index not in flow.reducing or flow.roles[index] is Role.UPDATE:
                continue
            eqn = flow.equations[index]
            given = frozenset[int]().union(*(flow.of_state[v] for v in reads(eqn)))
            homes = [min(self.held[v]) for v in given if self.held.get(v)]
            first = min(
                (
                    self.part[r]
                    for v in eqn.outputs
                    for r in flow.readers.get(v, ())
                    if r in self.part
                ),
                default=len(self.starts) - 1,
            )
            part = min(min(homes, default=0), first)
            self.place_equation(index, part)
            for value in given:
                self.held[value].add(part)

    def available(self, value: int) -> set[int] | None:
        """The parts that have a forward value; None if every part can compute it."""
        flow = self.flow
        if flow.small(value):
            return None
        maker = flow.maker.get(value)
        if maker in self.part:
            return self.known[value]
        if given := flow.of_state.get(value):
            homes = [self.held[v] for v in given if self.held.get(v)]
            return set[int].intersection(*homes) if homes else None
        return None

    def backward(self) -> None:
        flow = self.flow
        equations = self.of_role(Role.BACKWARD)
        modules: dict[str, set[int]] = defaultdict(set)
        for index, part in self.part.items():
            if flow.modules.get(index):
                modules[flow.modules[index]].add(part)
        backward = set(equations)
        choices: dict[int, set[int]] = {}
        for index in equations:
            eqn = flow.equations[index]
            before = [self.part[m] for m in self.makers(index) if m in backward]
            bound = min(before, default=len(self.starts) - 1)
            choice = self.choices(
                [v for v in reads(eqn) if flow.maker.get(v) not in backward], bound
            )
            named = choice & modules.get(flow.modules.get(index, ""), set())
            if not before or self.expands(index, backward):
                choices[index] = choice
            self.part[index] = max(named or choice)
        self.late(equations, choices)
        for index in equations:
            self.place_equation(index, self.part[index])

    def expands(self, index: int, backward: Collection[int]) -> bool:
        """Whether the results of an equation are larger than the gradients it reads."""
        flow = self.flow
        eqn = flow.equations[index]
        given = {v for v in reads(eqn) if flow.maker.get(v) in backward}
        sent = sum(flow.value(v).nbytes for v in given)
        return sum(flow.value(v).nbytes for v in eqn.outputs) > sent

    def makers(self, index: int) -> list[int]:
        """Returns the equations whose results an equation reads."""
        flow = self.flow
        found = (flow.maker.get(v) for v in reads(flow.equations[index]))
        return [m for m in found if m is not None]

    def choices(self, values: Iterable[int], bound: int) -> set[int]:
        """Returns the parts that have all given forward values, up to ``bound``.

        The result is never empty: if no part has all values, it has the parts with the
        largest values, and the other values are sent there.
        """
        everywhere = set(range(bound + 1))
        found = [(self.flow.value(v).nbytes, self.available(v)) for v in values]
        needs = sorted(
            ((n, a) for n, a in found if a is not None), key=lambda pair: -pair[0]
        )
        left = everywhere
        for _, parts in needs:
            left = (left & parts) or left
        if left == everywhere and needs:
            return {min(bound, max(needs[0][1]))}
        return left

    def late(self, equations: Sequence[int], choices: dict[int, set[int]]) -> None:
        """Moves recomputed and expanding equations to the part of their first backward
        reader.
        """
        flow = self.flow
        for index in reversed(equations):
            if index not in choices or len(choices[index]) < 2:
                continue
            wanted = {
                self.part[r]
                for v in flow.equations[index].outputs
                for r in flow.readers.get(v, ())
                if r in self.part and flow.roles[r] is Role.BACKWARD
            }
            if wanted:
                possible = {p for p in choices[index] if p >= max(wanted)}
                self.part[index] = min(possible or {max(choices[index])})

    def update(self) -> None:
        flow = self.flow
        equations = self.of_role(Role.UPDATE)
        unknown = [v for v in flow.state if v not in self.homes]
        for _ in range(3):
            for index in equations:
                self.by_operands(index)
            for index in reversed(equations):
                self.by_readers(index)
            for value in unknown:
                self.by_next(value)
        for index in equations:
            if index not in self.part:
                self.part[index] = self.by_small(index)
        for value in unknown:
            self.homes.setdefault(value, 0)

    def place(self, value: int) -> int | None:
        """Returns the part that computes or holds a value."""
        if value in self.homes:
            return self.homes[value]
        maker = self.flow.maker.get(value)
        if maker in self.part:
            return self.part[maker]
        given = self.flow.of_state.get(value, frozenset())
        found = {self.homes[v] for v in given if v in self.homes}
        return min(found) if found else None

    def by_operands(self, index: int) -> None:
        """Assigns an update to the part that has most of the bytes that it reads."""
        if index in self.part:
            return
        nbytes: Counter[int] = Counter()
        for value in reads(self.flow.equations[index]):
            part = self.place(value)
            if part is not None and self.flow.value(value).size > 1:
                nbytes[part] += self.flow.value(value).nbytes
        if nbytes:
            most = max(nbytes.values())
            self.part[index] = min(p for p, n in nbytes.items() if n == most)

    def by_readers(self, index: int) -> None:
        """Assigns an equation whose operands are small or free to its readers' part."""
        flow = self.flow
        eqn = flow.equations[index]
        large = any(flow.value(v).size > 1 for v in (*reads(eqn), *eqn.outputs))
        if index in self.part or not large:
            return
        found = {
            self.part[r]
            for v in eqn.outputs
            for r in flow.readers.get(v, ())
            if r in self.part
        }
        if found:
            self.part[index] = min(found)

    def by_next(self, value: int) -> None:
        """Assigns state that only the update reads to the part that updates it."""
        flow = self.flow
        if value in self.homes:
            return
        part = self.place(flow.carried_values.get(value, -1))
        if part is None:
            found = [
                self.part[r] for r in flow.readers.get(value, ()) if r in self.part
            ]
            part = min(found) if found else None
        if part is not None:
            self.homes[value] = part

    def by_small(self, index: int) -> int:
        """The part of an equation on scalars: the first if they are of several."""
        found = {
            part
            for v in reads(self.flow.equations[index])
            if (part := self.place(v)) is not None
        }
        return found.pop() if len(found) == 1 else 0


_ADDED = (Combine.SUM, Combine.MEAN)


def hoist_sums(
    found: Microbatched, parts: Parts, stage_of: Sequence[int]
) -> Microbatched:
    """Returns the program in which sums over stages are computed once per step.

    Args:
      found: the split of the step into microbatches.
      parts: the part of each equation.
      stage_of: part -> stage.
    """
    hoister = _Hoister(parts, stage_of)
    crossings: dict[int, Crossing] = {}
    for crossing in found.crossings:
        added = crossing.combine in _ADDED
        for value in hoister.hoist(crossing.value) if added else (crossing.value,):
            crossings.setdefault(value, dataclasses.replace(crossing, value=value))
    if not hoister.once:
        return found
    return dataclasses.replace(
        found,
        once=found.once | hoister.once,
        crossings=tuple(crossings.values()),
    )


def sums_over_parts(parts: Parts) -> frozenset[int]:
    """The backward equations that `hoist_sums` moves out if each part is a stage.

    Args:
      parts: the part of each equation.
    """
    flow = parts.flow
    hoister = _Hoister(parts, range(parts.count))
    for index, eqn in flow.equations.items():
        if flow.roles[index] is Role.UPDATE:
            for value in reads(eqn):
                hoister.hoist(value)
    return frozenset(hoister.once)


class _Hoister:
    def __init__(self, parts: Parts, stage_of: Sequence[int]) -> None:
        self.parts = parts
        self.stage_of = stage_of
        self.once: set[int] = set()

    def hoist(self, value: int) -> list[int]:
        """Moves sums over stages out of the microbatches; returns their summands."""
        eqn = self.maker(value)
        if eqn is None or not self.spans(eqn):
            return [value]
        self.once.add(eqn.index)
        added = reversed(eqn.arrays)
        return [leaf for atom in added for leaf in self.hoist(atom)]

    def maker(self, value: int) -> Equation | None:
        """The backward equation of a value that only equations run once read."""
        flow = self.parts.flow
        index = flow.maker.get(value, -1)
        if index not in self.parts.part or flow.roles[index] is not Role.BACKWARD:
            return None
        readers = flow.readers.get(value, ())
        late = all(flow.roles[r] is Role.UPDATE or r in self.once for r in readers)
        return flow.equations[index] if late else None

    def spans(self, eqn: Equation) -> bool:
        """Whether an equation adds values of several stages, or passes on a sum."""
        made = [self.behind(a) for a in eqn.arrays]
        if any(m is None for m in made):
            return False
        stages = {self.stage_of[self.parts.part[m.index]] for m in made if m}
        if eqn.primitive in ADDITIONS:
            return len(stages) > 1 or any(self.spans(m) for m in made if m)
        alone = eqn.primitive in UNARY and len(made) == 1
        return alone and all(self.spans(m) for m in made if m)

    def behind(self, value: int) -> Equation | None:
        """The backward equation that computes a value with a single reader, or None."""
        flow = self.parts.flow
        index = flow.maker.get(value, -1)
        if index not in self.parts.part or flow.roles[index] is not Role.BACKWARD:
            return None
        alone = len(flow.readers.get(value, ())) == 1
        return flow.equations[index] if alone else None
