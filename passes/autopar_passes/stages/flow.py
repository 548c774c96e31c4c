"""What the top-level equations of a microbatch's program depend on.

An equation that depends on the state and on the batch runs in one part of a pipeline.
One that depends on at most one of them is *free*: it runs wherever somebody reads it,
so that no cast weight and no mask is ever sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from autopar_passes import jax_compat
from autopar_passes.graph.operators import GraphInput, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Equation, Program, Region, Value

# Arrays of at most so many elements are sent to whoever reads them: counters, keys,
# learning rates and loss scales.
SMALL = 16
# A free equation whose results are at most this part of what it reads runs where the
# state is that it reads: a sum of squares is sent, its weights are not.
REDUCING = 1 / 8


@dataclasses.dataclass(frozen=True)
class Flow:
    """Who makes and who reads each value, and what it depends on.

    Attributes:
      program: one microbatch's program.
      graph: its operator graph.
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
        """Value -> the top-level equation that makes it."""
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
        """Equation -> its role: that of the operator which makes its first result.

        What runs once is of the update. What each microbatch makes of its rows is not,
        also where the graph says so: a gradient times a loss scale. A gradient that the
        loss is made of is of the forward pass, such as the steps of an inner optimizer.
        What a microbatch reads is made for it: a part of the state that it adds to.
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
        """The equations that read what each microbatch has for itself."""
        known, out = set(self.batch), set[int]()
        for index, eqn in self.equations.items():
            if index not in self.once and not known.isdisjoint(reads(eqn)):
                out.add(index)
                known.update(eqn.outputs)
        return frozenset(out)

    @functools.cached_property
    def modules(self) -> dict[int, str]:
        """Equation -> its module path, '' where unknown."""
        return {op.equation: op.module for op in self.graph.operators}

    @functools.cached_property
    def state(self) -> frozenset[int]:
        """The inputs that one part holds: parameters, their moments, what is large.

        Counters, keys, learning rates and loss scales go to all that read them.
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
        """State input -> the value that is its next one."""
        outputs = self.program.body.outputs
        return {
            given.value: out
            for given in self.graph.inputs
            if given.output >= 0 and isinstance(out := outputs[given.output], int)
        }

    def value(self, number: int) -> Value:
        """Shape and dtype of a value."""
        return self.program.values[number]

    def small(self, number: int) -> bool:
        """Whether a value is sent to whoever reads it without a thought."""
        value = self.value(number)
        return value.size <= SMALL or jax_compat.is_extended(value.dtype)

    @functools.cached_property
    def free(self) -> frozenset[int]:
        """The equations that depend on the state or on the batch, but not on both.

        What comes after the backward pass is free where it reads small inputs alone.
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
        """Value of an input or a free equation -> the state that it is made of."""
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
        """The free equations that make little of much state."""
        out: set[int] = set()
        for index in self.free:
            eqn = self.equations[index]
            held = [v for v in reads(eqn) if self.of_state[v] and not self.small(v)]
            made = sum(self.value(v).nbytes for v in eqn.outputs)
            if held and made <= REDUCING * sum(self.value(v).nbytes for v in held):
                out.add(index)
        return frozenset(out)


def reads(eqn: Equation) -> tuple[int, ...]:
    """The values that an equation reads, also within its regions, each once."""
    found = dict.fromkeys(v for v in eqn.inputs if isinstance(v, int))
    for region in eqn.regions:
        found.update(dict.fromkeys(_outside(region)))
    return tuple(found)


def _outside(region: Region) -> Iterator[int]:
    """Values that a region reads of what is around it."""
    known = set(region.inputs)
    for eqn in region.equations:
        yield from (v for v in reads(eqn) if v not in known)
        known.update(eqn.outputs)
    yield from (v for v in region.outputs if isinstance(v, int) and v not in known)
