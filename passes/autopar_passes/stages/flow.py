"""The dependencies of the top-level equations of a microbatch's program.

An equation that depends on both state and batch runs in one part of a pipeline. An
equation that depends on at most one of them is *free*: it runs in every pipeline part
that reads its results. Cast weights and masks are therefore never sent.
"""

from __future__ import annotations

import dataclasses
import functools

from autopar_passes import jax_compat
from autopar_passes.graph.operators import GraphInput, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Equation, Program, Value, reads

# Arrays with at most this many elements are sent to every part that reads them:
# counters, keys, learning rates and loss scales.
SMALL = 16
# A free equation runs only in the part that holds its state if its results have at most
# this share of the bytes of that state. For example, a sum of squares is sent, but its
# weights are not.
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
        """Equation -> its role: the role of the operator that makes its first result.

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
        """Shape and dtype of a value."""
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
        """Value of an input or a free equation -> the state that it depends on."""
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
