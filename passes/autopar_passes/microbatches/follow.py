"""Follows the classes of values through the program of a microbatch.

A value of the whole batch is the same as that of a microbatch, or its rows are those
of all microbatches, or it is their sum. The program of a microbatch has the constants
of the whole batch, so a mean is a sum of parts. What is the same in all microbatches
and meets a sum counts ``1 / M`` in each.

Where a sum over the batch is needed before it is complete, the batch is *coupled*. A
sum of what was given with the batch alone (the number of tokens that count) is
computed ahead. Otherwise each microbatch may take ``M`` times its own part for the
whole: so batch normalisation has the statistics of each microbatch, and its backward
pass follows by the same rule.
"""

from __future__ import annotations

from autopar_passes.graph.roles import Role
from autopar_passes.microbatches import operators
from autopar_passes.microbatches.classes import (
    ANY_ROWS,
    LOCAL,
    SAME,
    SUM,
    Edits,
    Kind,
    Split,
    joined,
)
from autopar_passes.microbatches.draws import can_draw
from autopar_passes.microbatches.facts import RANDOM, Facts
from autopar_passes.microbatches.microbatched import MicrobatchError
from autopar_passes.microbatches.pairs import Pair, place
from autopar_passes.program.equations import Atom, Equation, Region, Scalar, walk


class _Late(Exception):  # no error: it ends the look at an equation
    """An equation needs whole values, and can wait for them."""


class _Again(Exception):  # no error: it starts a loop anew
    """A loop must be looked at again: what enters it has another class."""


class Follower:
    """Follows the classes of values through one program."""

    def __init__(self, pair: Pair, facts: Facts, *, couple: bool) -> None:
        """Knows no class yet.

        Args:
          pair: the programs.
          facts: of the step.
          couple: whether everything that couples the batch is computed from each
            microbatch alone.
        """
        self.pair = pair
        self.facts = facts
        self.couple = couple
        self.classes: dict[int, Split] = {}
        self.edits = Edits()
        self.once: set[int] = set()
        self.local: dict[str, None] = {}
        self._modules: set[str] = set()
        self._top: Equation | None = None
        # Inputs of regions -> the equation and operand that they come from.
        self._outer: dict[int, tuple[Equation, int]] = {}
        self._forced: dict[tuple[int, int], Split] = {}

    def run(self) -> None:
        """Follows the whole program.

        Raises:
          MicrobatchError: it cannot be split.
        """
        after: set[int] = set()
        for eqn in self.pair.micro.body.equations:
            if eqn.source.effects and self._calls_once(eqn):
                self.once.add(eqn.index)
                after.update(eqn.outputs)
                continue
            role = self.facts.roles[eqn.index]
            late = not after.isdisjoint(a for a in eqn.inputs if isinstance(a, int))
            if late and role is Role.BACKWARD:
                raise MicrobatchError(
                    f"{place(eqn)} of the backward pass needs what the update has "
                    "made: the batch would be gone through more than once."
                )
            if not late and (role is not Role.UPDATE or self._reads_rows(eqn)):
                self._top = eqn
                try:
                    self.equation(eqn)
                    continue
                except _Late:
                    self._forget(eqn)
            self.once.add(eqn.index)
            after.update(eqn.outputs)

    def _calls_once(self, eqn: Equation) -> bool:
        """Whether the host is called once, with what the whole batch makes.

        A loop over rows calls it for those of each microbatch.
        """
        if not eqn.regions:
            return True
        kinds = {self.of(a).kind for a in eqn.inputs if a in self.classes}
        return Kind.SUM in kinds and not self._reads_rows(eqn)

    def _reads_rows(self, eqn: Equation) -> bool:
        """Whether an equation reads rows, such as the gradient of each of them."""
        read = [a for a in eqn.inputs if isinstance(a, int)]
        return any(
            v in self.classes and self.classes[v].kind is Kind.ROWS for v in read
        )

    def _forget(self, eqn: Equation) -> None:
        self.edits.forget(eqn.index)
        for region in eqn.regions:
            for inner in walk(region):
                self.edits.forget(inner.index)

    def of(self, atom: Atom) -> Split:
        """The class of an atom."""
        return SAME if isinstance(atom, Scalar) else self.classes[atom]

    def operand(self, eqn: Equation, slot: int) -> Split:
        """The class of an operand, with what was found to be needed of it."""
        return self._forced.get((eqn.index, slot), self.of(eqn.inputs[slot]))

    def equation(self, eqn: Equation) -> None:
        """Finds the classes of the results of an equation."""
        match eqn.primitive:
            case "scan":
                found = self._until_settled(eqn, self._scan)
            case "while":
                found = self._until_settled(eqn, self._while)
            case "cond":
                found = self._until_settled(eqn, self._cond)
            case "optimization_barrier":
                found = [self.of(a) for a in eqn.inputs]
            case _:
                found = self._plain(eqn)
        self.classes.update(zip(eqn.outputs, found, strict=True))

    # -- equations without regions -------------------------------------------------

    def _plain(self, eqn: Equation) -> list[Split]:
        given = [self.of(a) for a in eqn.inputs]
        if not eqn.outputs:
            return []
        kinds = {c.kind for c in given}
        if eqn.primitive == "iota" or Kind.POSITION in kinds:
            return self._positions(eqn, given)
        if Kind.ROWS not in kinds and operators.moved(self.pair, eqn):
            return self._coupled(eqn, "counts the rows")
        if Kind.SUM in kinds:
            return self._sums(eqn, given)
        if Kind.ROWS in kinds:
            return self._rows(eqn, given)
        if any(self.pair.has_rows(v) for v in eqn.outputs):
            return self._rows_of_none(eqn, given)
        return [LOCAL if Kind.LOCAL in kinds else SAME] * len(eqn.outputs)

    def _positions(self, eqn: Equation, given: list[Split]) -> list[Split]:
        found = operators.positions(self.pair, eqn, given)
        if found is None:
            return self._coupled(eqn, "uses the numbers of the rows")
        if found.kind is Kind.POSITION:
            self.edits.kept.add(eqn.index)
        return [found] * len(eqn.outputs)

    def _rows_of_none(self, eqn: Equation, given: list[Split]) -> list[Split]:
        """Values with rows are made of values without."""
        if eqn.primitive in RANDOM:
            if eqn.primitive not in operators.FOLDED:
                return self._coupled(eqn, "draws random numbers for rows")
            return [self._drawn(eqn, given[0])]
        if eqn.primitive not in operators.SPREADING:
            return self._coupled(eqn, "makes rows that differ")
        return [ANY_ROWS]

    def _drawn(self, eqn: Equation, key: Split) -> Split:
        """Random numbers for rows: those of the whole batch, if they can be had."""
        inner = self._adjacent(eqn.outputs[0])
        of = eqn.inputs[0]
        if key.kind is Kind.SAME and isinstance(of, int):
            if can_draw(eqn, self.pair.micro.values[of].dtype):
                self.edits.drawn[eqn.index] = inner
            else:
                self.edits.folded.add((eqn.index, 0))
                op = self.facts.operators[eqn.index]
                self.local.setdefault(f"random numbers of {op.module or op.source}")
        return Split(Kind.ROWS, inner)

    def _adjacent(self, value: int) -> int:
        """How many adjacent rows of a value are of one row of the batch, or of a group.

        A batch of B rows that is flattened with S others has B S rows, S of each.
        """
        body, rows = self.pair.whole.body, self.pair.rows_of(value)
        for given in body.inputs:
            if self.pair.has_rows(given):
                held = rows * self.classes[given].inner
                if held % self.pair.rows_of(given) == 0:
                    return held // self.pair.rows_of(given)
        return 1

    def _rows(self, eqn: Equation, given: list[Split]) -> list[Split]:
        op = self.facts.operators[eqn.index]
        found = operators.rows(self.pair, eqn, given, op.rule)
        if isinstance(found, str):
            return self._coupled(eqn, found)
        if SUM in found and eqn.primitive == "scatter-add":
            self.as_part(eqn, 0)
        return found

    def _sums(self, eqn: Equation, given: list[Split]) -> list[Split]:
        """At least one operand is a sum over the microbatches."""
        sums = [k for k, c in enumerate(given) if c.kind is Kind.SUM]
        rows = any(c.kind is Kind.ROWS for c in given)
        settled = rows or any(self.pair.has_rows(v) for v in eqn.outputs)
        linear = None if settled else operators.linear_in(self.pair, eqn, sums)
        if linear is None:
            for slot in sums:
                given[slot] = self.settle(eqn, slot)
            return self._with_classes(eqn, given)
        for slot in [k for k in sums if k not in linear.sums]:
            given[slot] = self.settle(eqn, slot)
        for slot in linear.parts:
            if given[slot].kind is not Kind.SUM:
                self.as_part(eqn, slot)
        return [SUM] * len(eqn.outputs)

    def _with_classes(self, eqn: Equation, given: list[Split]) -> list[Split]:
        kinds = {c.kind for c in given}
        if Kind.ROWS in kinds:
            return self._rows(eqn, given)
        if any(self.pair.has_rows(v) for v in eqn.outputs):
            return self._rows_of_none(eqn, given)
        return [LOCAL if Kind.LOCAL in kinds else SAME] * len(eqn.outputs)

    # -- what is needed of an operand ----------------------------------------------

    def as_part(self, eqn: Equation, slot: int) -> None:
        """Makes an operand that all microbatches have alike count once in their sum."""
        atom = eqn.inputs[slot]
        if operators.is_zero(self.pair.made_by, atom):
            return
        value = atom.aval if isinstance(atom, Scalar) else self.pair.micro.values[atom]
        if operators.is_float(value.dtype):
            self.edits.scaled[eqn.index, slot] = 1 / self.pair.count
        elif operators.is_integer(value.dtype):
            self.edits.first.add((eqn.index, slot))
        else:
            raise MicrobatchError(
                f"{place(eqn)} adds what no microbatch has a part of."
            )

    def settle(self, eqn: Equation, slot: int) -> Split:
        """The class of a sum that is needed before all microbatches are through."""
        value = eqn.inputs[slot]
        assert isinstance(value, int)
        origin = self._outer.get(value)
        if value in self.facts.given:
            self.edits.ahead[eqn.index, slot] = value
            return SAME
        if origin is not None and self._source(origin) in self.facts.given:
            loop, place_of = origin
            self._forced[loop.index, place_of] = SAME
            self.edits.ahead[loop.index, place_of] = self._source(origin)
            raise _Again(loop.index)
        self._wait_or_accept(eqn, value, "needs a sum over the batch")
        self.edits.scaled[eqn.index, slot] = float(self.pair.count)
        return LOCAL

    def _source(self, origin: tuple[Equation, int]) -> int:
        atom = origin[0].inputs[origin[1]]
        return atom if isinstance(atom, int) else -1

    def _coupled(self, eqn: Equation, why: str) -> list[Split]:
        """The classes of results that depend on several rows in another way."""
        plain = [v for v in eqn.outputs if not self.pair.has_rows(v)]
        if self.facts.given.issuperset(eqn.outputs) and len(plain) == len(eqn.outputs):
            self.edits.replaced.update(eqn.outputs)
            return [SAME] * len(eqn.outputs)
        self._wait_or_accept(eqn, None, why)
        return [
            Split(Kind.ROWS, 1) if self.pair.has_rows(v) else LOCAL for v in eqn.outputs
        ]

    def _wait_or_accept(self, eqn: Equation, value: int | None, why: str) -> None:
        """Lets an equation wait for the whole batch, or takes the microbatch for it.

        Raises:
          MicrobatchError: neither is possible.
        """
        assert self._top is not None
        if self._top.index not in self.facts.back:
            raise _Late
        op = self.facts.operators[eqn.index]
        known = value in self.facts.statistics or (
            op.role is Role.BACKWARD and op.module in self._modules
        )
        if not known and not self.couple:
            if value in self.facts.updated and op.role is not Role.BACKWARD:
                raise MicrobatchError(
                    f"{place(eqn)} needs whole gradients, and a backward pass reads "
                    "what it makes: the batch would be gone through more than once."
                )
            raise MicrobatchError(
                f"{place(eqn)} {why} before the backward pass"
                + (f", in {op.module}" if op.module else "")
                + ": the loss of one row depends on the others."
            )
        if op.role is Role.FORWARD or op.module not in self._modules:
            what = "batch statistics" if value in self.facts.statistics else place(eqn)
            where = op.module or op.source
            self.local.setdefault(f"{what} of {where}" if where else what)
        self._modules.add(op.module)

    # -- loops and branches ----------------------------------------------------------

    def _until_settled(self, eqn: Equation, look: operators.Look) -> list[Split]:
        while True:
            try:
                return look(eqn)
            except _Again as again:
                if again.args != (eqn.index,):
                    raise

    def _enter(self, eqn: Equation, slots: list[int], inputs: list[int]) -> None:
        for slot, value in zip(slots, inputs, strict=True):
            self._outer[value] = (eqn, slot)
            self.classes[value] = self.operand(eqn, slot)

    def _body(self, region: Region) -> list[Split]:
        for eqn in region.equations:
            self.edits.forget(eqn.index)
            self.equation(eqn)
        return [self.of(a) for a in region.outputs]

    def _loop(
        self, eqn: Equation, region: Region, start: int, carried: list[int], first: int
    ) -> list[Split]:
        """Goes through a body until the classes of what it carries stay.

        Args:
          eqn: the loop.
          region: its body.
          start: the first of its operands that is carried.
          carried: the inputs of the body that are carried.
          first: the first of its results that is carried.
        """
        now = [self.operand(eqn, start + k) for k in range(len(carried))]
        while True:
            self.classes.update(zip(carried, now, strict=True))
            out = self._body(region)
            new = [
                self._join(eqn, a, b)
                for a, b in zip(now, out[first : first + len(now)], strict=True)
            ]
            if new == now:
                break
            now = new
        for k, split in enumerate(now):
            if split.kind is Kind.SUM:
                if self.operand(eqn, start + k).kind is not Kind.SUM:
                    self.as_part(eqn, start + k)
                if out[first + k].kind is not Kind.SUM:
                    raise MicrobatchError(f"{place(eqn)} carries a sum in some turns.")
        return out[:first] + now + out[first + len(now) :]

    def _join(self, eqn: Equation, a: Split, b: Split) -> Split:
        found = joined(a, b)
        if found is None:
            raise MicrobatchError(
                f"{place(eqn)} makes rows in one case, and none in another."
            )
        return found

    def _scan(self, eqn: Equation) -> list[Split]:
        params, body = eqn.params, eqn.regions[0]
        consts, carry = params["num_consts"], params["num_carry"]
        whole = self.pair.sources[eqn.index]
        if whole.params["length"] != params["length"]:
            return self._coupled(eqn, "goes through the rows one by one")
        rest = [*range(consts), *range(consts + carry, len(eqn.inputs))]
        self._enter(eqn, rest, [body.inputs[k] for k in rest])
        for k in range(consts, consts + carry):
            self._outer[body.inputs[k]] = (eqn, k)
        carried = list(body.inputs[consts : consts + carry])
        return self._loop(eqn, body, consts, carried, 0)

    def _while(self, eqn: Equation) -> list[Split]:
        test, body = eqn.regions
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self._enter(eqn, list(range(n_test)), list(test.inputs[:n_test]))
        slots = list(range(n_test, n_test + n_body))
        self._enter(eqn, slots, list(body.inputs[:n_body]))
        carried = list(body.inputs[n_body:])
        found = self._loop(eqn, body, n_test + n_body, carried, 0)
        self.classes.update(zip(test.inputs[n_test:], found, strict=True))
        (again,) = self._body(test)
        if again.kind not in (Kind.SAME, Kind.LOCAL):
            return self._coupled(eqn, "goes on until all rows are through")
        return found

    def _cond(self, eqn: Equation) -> list[Split]:
        if self.of(eqn.inputs[0]).kind is Kind.SUM:
            self.settle(eqn, 0)
        found: list[Split] | None = None
        slots = list(range(1, len(eqn.inputs)))
        for region in eqn.regions:
            self._enter(eqn, slots, list(region.inputs))
            out = self._body(region)
            if found is not None:
                for a, b in zip(found, out, strict=True):
                    if (a.kind is Kind.SUM) is not (b.kind is Kind.SUM):
                        return self._coupled(eqn, "has a sum in one branch only")
                out = [self._join(eqn, a, b) for a, b in zip(found, out, strict=True)]
            found = out
        assert found is not None
        return found
