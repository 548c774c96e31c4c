"""Finds how each value of a whole batch follows from the values of the microbatches.

Every value gets a *class* (`autopar_passes.microbatches.facts.Split`). A value of the
whole batch may equal the value of every microbatch, may consist of the rows of all
microbatches, or may be the sum over the microbatches. The program of a microbatch has
the constants of the whole batch, so a mean is the sum of the microbatches' values. If a
value that all microbatches share is added to a sum, each microbatch adds ``1 / M`` of
the value.

If a sum over the batch is needed before all microbatches have run, the batch is
*coupled*. A sum that depends only on the given batch (such as the number of unmasked
tokens) is computed ahead. For any other sum, each microbatch may use ``M`` times its
own part as an estimate of the whole sum. For example, batch normalisation then uses the
statistics of each microbatch, also in the sums of its backward pass.

The step may mix rows of the batch before the model reads them, for example reverse,
permute or sample them. Mixed rows are computed ahead from the whole batch too. Each
microbatch then takes its rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from autopar_passes import jax_compat
from autopar_passes.graph.roles import REPEATED, Role, module_path
from autopar_passes.microbatches import kernels, operators
from autopar_passes.microbatches.draws import can_draw
from autopar_passes.microbatches.facts import (
    ANY_ROWS,
    LOCAL,
    POSITION,
    RANDOM,
    SAME,
    SUM,
    WHOLE,
    Edits,
    Facts,
    Kind,
    MicrobatchError,
    Pair,
    Split,
    check_dims,
    join_splits,
    loop_of_updates,
    place_of,
)
from autopar_passes.microbatches.operators import picked_by_order, taken_from_others
from autopar_passes.program.equations import Atom, Equation, Region, Scalar
from autopar_passes.sums.stacked import ADDITIONS

# Loops over the rows of a batch: each iteration of such a loop processes one row.


def added_up(eqn: Equation) -> list[bool] | None:
    """Returns which carried values a scan only adds to; None if rows depend on others.

    The transpose of a map over rows sums gradients: each iteration adds the gradients
    of one row.

    Returns:
      For each carried value, whether the iterations only add to it. The other carried
      values never change, so the iterations may read them.
    """
    (body,) = eqn.regions
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    reads: dict[int, list[Equation]] = {}
    for inner in body.equations:
        for atom in inner.inputs:
            if isinstance(atom, int):
                reads.setdefault(atom, []).append(inner)
    found: list[bool] = []
    for start, end in zip(
        body.inputs[first : first + count], body.outputs[:count], strict=True
    ):
        adds = isinstance(end, int) and _adds(body, reads, start, end)
        if end != start and not adds:
            return None
        found.append(end != start)
    return found


def _adds(body: Region, reads: dict[int, list[Equation]], value: int, end: int) -> bool:
    """Whether a region computes ``end`` from a value only by adding to the value."""
    while value != end:
        following = reads.get(value, [])
        if len(following) != 1 or value in body.outputs:
            return False
        (eqn,) = following
        adds = eqn.primitive in ADDITIONS and eqn.inputs.count(value) == 1
        if not adds and not _hands_on(eqn):
            return False
        (value,) = eqn.outputs
    return not reads.get(end) and body.outputs.count(end) == 1


def _hands_on(eqn: Equation) -> bool:
    """Whether an equation returns its operand, as a conversion to its own dtype."""
    (given,) = eqn.source.invars[:1]
    kind = eqn.primitive == "convert_element_type"
    return kind and given.aval.dtype == eqn.params["new_dtype"]


# Facts about the values of a program, collected while the program is followed.


class Again(Exception):  # no error: the loop is followed anew
    """A loop must be followed again, because an input of the loop has a new class."""


class Known:
    """The classes of values, and the edits that the classes require.

    Attributes:
      classes: the classes of the values that were followed so far.
      edits: the changes to the program of a microbatch.
      outer: input of a region -> the equation and the operand that it comes from.
      forced: operands that are given another class than the value that they read.
    """

    def __init__(self, pair: Pair, facts: Facts, unit: int) -> None:
        """Assigns classes to the inputs.

        Args:
          pair: the programs of the whole batch and of one microbatch.
          facts: the facts of the step.
          unit: the number of neighbouring rows of the batch that stay together.
        """
        self.pair = pair
        self.facts = facts
        arguments = pair.micro.body.inputs[: pair.micro.num_arguments]
        self.classes: dict[int, Split] = {
            v: Split(Kind.ROWS, unit) if pair.has_rows(v) else SAME for v in arguments
        }
        self.edits = Edits()
        self.outer: dict[int, tuple[Equation, int]] = {}
        self.forced: dict[tuple[int, int], Split] = {}
        for value in pair.micro.constant_arrays:
            self.classes[value] = self.of_whole(value)
            if self.classes[value] != SAME:
                self.edits.replaced.add(value)

    def of(self, atom: Atom) -> Split:
        """Returns the class of an atom."""
        return SAME if isinstance(atom, Scalar) else self.classes[atom]

    def operand(self, eqn: Equation, slot: int) -> Split:
        """Returns the class of an operand, which an edit may have changed."""
        return self.forced.get((eqn.index, slot), self.of(eqn.inputs[slot]))

    def hoist(self, values: Sequence[int]) -> list[Split]:
        """Marks values to be computed ahead from the whole batch.

        Returns the classes of the values.
        """
        self.edits.replaced.update(values)
        self.classes.update((v, self.of_whole(v)) for v in values)
        return [self.classes[v] for v in values]

    def of_whole(self, value: int) -> Split:
        """Returns the class of a value that is computed from the whole batch."""
        if self.pair.dims[value] < -1:
            return WHOLE
        if not self.pair.has_rows(value):
            return SAME
        return Split(Kind.ROWS, self.adjacent(value))

    def adjacent(self, value: int) -> int:
        """The number of adjacent entries of a value that belong to one group of rows.

        If a batch of B rows is flattened with a dimension of size S, the result has B S
        rows, and S of them belong to each row of the batch.
        """
        body, rows = self.pair.whole.body, self.pair.rows_of(value)
        for given in body.inputs:
            if self.pair.has_rows(given):
                held = rows * self.classes[given].inner
                if held % self.pair.rows_of(given) == 0:
                    return held // self.pair.rows_of(given)
        return 1

    def as_part(self, eqn: Equation, slot: int) -> None:
        """Makes an operand that all microbatches share count once in their sum."""
        atom = eqn.inputs[slot]
        if operators.is_zero(self.pair.made_by, atom):
            return
        value = atom.aval if isinstance(atom, Scalar) else self.pair.micro.values[atom]
        if operators.is_float(value.dtype):
            self.edits.scaled[eqn.index, slot] = float(1 / self.pair.count)
        elif operators.is_integer(value.dtype):
            self.edits.first.add((eqn.index, slot))
        else:
            raise MicrobatchError(
                f"{place_of(eqn)} adds what no microbatch has a part of."
            )

    def numbers(self, eqn: Equation, slot: int) -> Split:
        """Takes a microbatch's row numbers from those of the whole batch."""
        value = eqn.inputs[slot]
        assert isinstance(value, int)
        if value in self.facts.given:
            self.edits.ahead[eqn.index, slot] = value
            return self.of_whole(value)
        origin = self.outer.get(value)
        if origin is None or self.source(origin) not in self.facts.given:
            raise MicrobatchError(f"{place_of(eqn)} uses the numbers of the rows.")
        self.force(origin, self.of_whole(self.source(origin)))

    def force(self, origin: tuple[Equation, int], split: Split) -> NoReturn:
        """Marks a loop's operand to be computed ahead, and starts the loop over."""
        loop, slot = origin
        self.forced[loop.index, slot] = split
        self.edits.ahead[loop.index, slot] = self.source(origin)
        raise Again(loop.index)

    def source(self, origin: tuple[Equation, int]) -> int:
        """The value that an input of a region comes from; -1 if it is a scalar."""
        atom = origin[0].inputs[origin[1]]
        return atom if isinstance(atom, int) else -1


class _Late(Exception):  # not an error: ends the analysis of an equation
    """An equation needs whole values, and can run after all microbatches."""


class Follower:
    """Determines the class of every value of one program, equation by equation."""

    def __init__(
        self,
        pair: Pair,
        facts: Facts,
        unit: int,
        *,
        couple: bool,
        hoisted: frozenset[int] = frozenset(),
        regrouped: frozenset[int] = frozenset(),
    ) -> None:
        """Assigns classes to the inputs.

        Args:
          pair: the programs of the whole batch and of one microbatch.
          facts: the facts of the step.
          unit: the number of neighbouring rows of the batch that stay together.
          couple: whether each microbatch computes values that couple the batch from its
            own rows only.
          hoisted: top-level equations that are computed ahead from the whole batch.
          regrouped: equations on rows that are sorted only to group them
            (`autopar_passes.graph.row_orders`). A microbatch sorts its own rows.
        """
        self.pair = pair
        self.facts = facts
        self.couple = couple
        self.hoisted = hoisted
        self.regrouped = regrouped
        self.known = Known(pair, facts, unit)
        self.once: set[int] = set()
        self.local: dict[str, None] = {}
        self._modules: set[str] = set()
        self._top: Equation | None = None
        # Whether the equation is in a sampler of `jax.random` that draws again for
        # rejected rows.
        self._sampling = False

    def run(self) -> None:
        """Follows the whole program, or raises a `MicrobatchError`."""
        try:
            self._follow()
        except MicrobatchError:
            loop = loop_of_updates(self.pair, self.facts.operators)
            if loop is None:
                raise
            raise MicrobatchError(
                f"{place_of(loop)} goes through the batch in each of its turns, and a "
                "turn needs the whole gradients of the turn before: the batch would "
                "be gone through more than once."
            ) from None

    def _follow(self) -> None:
        after: set[int] = set()
        for eqn in self.pair.micro.body.equations:
            if eqn.source.effects and self._calls_once(eqn):
                self.once.add(eqn.index)
                after.update(eqn.outputs)
                continue
            role = self.facts.roles[eqn.index]
            late = not after.isdisjoint(eqn.arrays)
            if late and role is Role.BACKWARD:
                raise MicrobatchError(
                    f"{place_of(eqn)} of the backward pass needs what the update has "
                    "made: the batch would be gone through more than once."
                )
            if not late and (role is not Role.UPDATE or self._reads_rows(eqn)):
                self._top = eqn
                if self._in_microbatches(eqn):
                    continue
            self.once.add(eqn.index)
            after.update(eqn.outputs)
        self._count_once()

    def _count_once(self) -> None:
        """Lets equations that run once read the row numbers of the whole batch."""
        body = self.pair.micro.body
        late = [e.inputs for e in body.equations if e.index in self.once]
        read = [a for atoms in (*late, body.outputs) for a in atoms]
        self.known.edits.counted.update(
            a
            for a in read
            if isinstance(a, int) and self.known.classes.get(a) == POSITION
        )

    def _calls_once(self, eqn: Equation) -> bool:
        """Whether a host callback runs once, with values of the whole batch.

        A callback inside a loop over rows runs for the rows of each microbatch instead.
        """
        if not eqn.regions:
            return True
        kinds = {self.known.of(a).kind for a in eqn.inputs if a in self.known.classes}
        return Kind.SUM in kinds and not self._reads_rows(eqn)

    def _in_microbatches(self, eqn: Equation) -> bool:
        """Finds the classes of a top-level equation.

        The result is False if the equation must run once, after all microbatches.
        """
        ahead = self.facts.given.issuperset(eqn.outputs)
        if ahead and eqn.index in self.hoisted:
            self.known.hoist(eqn.outputs)
            return True
        known = dict(self.local), set(self._modules)
        try:
            self.equation(eqn)
        except _Late:
            self._forget(eqn)
            return False
        except MicrobatchError:
            if not ahead:
                raise
            self._forget(eqn)
            self.local, self._modules = known
            self.known.hoist(eqn.outputs)
        return True

    def _reads_rows(self, eqn: Equation) -> bool:
        """Whether an equation reads rows, such as the gradient of each row."""
        read = eqn.arrays
        return any(
            v in self.known.classes and self.known.classes[v].kind is Kind.ROWS
            for v in read
        )

    def _forget(self, eqn: Equation) -> None:
        self.known.edits.forget(eqn.index)
        for inner in eqn.inner:
            self.known.edits.forget(inner.index)

    def equation(self, eqn: Equation) -> None:
        """Finds the classes of the results of an equation."""
        self._check_part(eqn)
        match eqn.primitive:
            case "scan":
                found = self._until_settled(eqn, self._scan)
            case "while":
                found = self._until_settled(eqn, self._while)
            case "cond":
                found = self._until_settled(eqn, self._cond)
            case "optimization_barrier":
                found = [self.known.of(a) for a in eqn.inputs]
            case _:
                found = self._plain(eqn)
        self.known.classes.update(zip(eqn.outputs, found, strict=True))

    def _check_part(self, eqn: Equation) -> None:
        """Checks that a microbatch has its part of all operands and results."""
        try:
            check_dims(self.pair, eqn)
            if WHOLE in map(self.known.of, eqn.inputs):
                raise MicrobatchError(
                    f"{place_of(eqn)} reads what only the whole batch has."
                )
        except MicrobatchError:
            assert self._top is not None
            if self._top.index not in self.facts.back:
                raise _Late from None
            raise

    # -- equations without regions -------------------------------------------------

    def _plain(self, eqn: Equation) -> list[Split]:
        given = [self.known.of(a) for a in eqn.inputs]
        kinds = {c.kind for c in given}
        if eqn.source.effects and Kind.SUM in kinds:
            raise MicrobatchError(
                f"{place_of(eqn)} would tell the host a part of a sum over rows, once "
                "for each microbatch. Call it outside of the loop, or give "
                "microbatches=1."
            )
        if not eqn.outputs:
            return []
        if eqn.index in self.regrouped:
            return self._grouped_rows(eqn)
        if eqn.primitive == "iota" or Kind.POSITION in kinds:
            return self._positions(eqn, given)
        if Kind.ROWS not in kinds and operators.is_moved(self.pair, eqn):
            return self._couple(eqn, "counts the rows")
        return self._by_classes(eqn, given)

    def _grouped_rows(self, eqn: Equation) -> list[Split]:
        """Finds the classes of results that have or sum a microbatch's sorted rows."""
        found = [
            Split(Kind.ROWS, self.known.adjacent(v)) if self.pair.has_rows(v) else SUM
            for v in eqn.outputs
        ]
        if SUM in found:
            if self.facts.operators[eqn.index].rule.reduction != "sum":
                return self._couple(eqn, "brings rows together")
            if eqn.primitive == "scatter-add":
                self.known.as_part(eqn, 0)
        return found

    def _positions(self, eqn: Equation, given: list[Split]) -> list[Split]:
        found = operators.positions(self.pair, eqn, given)
        if found is not None:
            if found.kind is Kind.POSITION:
                self.known.edits.kept.add(eqn.index)
            return [found] * len(eqn.outputs)
        if self.facts.given.issuperset(eqn.outputs):
            return self.known.hoist(eqn.outputs)
        for slot, split in enumerate(given):
            if split.kind is Kind.POSITION:
                given[slot] = self.known.numbers(eqn, slot)
        return self._by_classes(eqn, given)

    def _rows_of_none(self, eqn: Equation, given: list[Split]) -> list[Split]:
        """Finds the classes of an operation's outputs if only the outputs have rows."""
        if eqn.primitive in RANDOM:
            if eqn.primitive not in operators.FOLDED:
                return self._couple(eqn, "draws random numbers for rows")
            return [self._draw(eqn, given[0])]
        if eqn.primitive not in operators.SPREADING:
            return self._couple(eqn, "makes rows that differ")
        return [ANY_ROWS]

    def _draw(self, eqn: Equation, key: Split) -> Split:
        """Returns the class of random numbers for rows.

        If possible, each row gets the numbers that it gets in the whole batch.
        Otherwise each microbatch gets a key of its own.
        """
        inner = self.known.adjacent(eqn.outputs[0])
        of = eqn.inputs[0]
        if key.kind is Kind.SAME and isinstance(of, int):
            if can_draw(eqn, self.pair.micro.values[of].dtype):
                self.known.edits.drawn[eqn.index] = inner
            else:
                self._fold(eqn, 0)
        return Split(Kind.ROWS, inner)

    def _fold(self, eqn: Equation, slot: int) -> None:
        """Gives each microbatch its own random key."""
        self.known.edits.folded.add((eqn.index, slot))
        where = module_path(eqn.name_stack) or jax_compat.source_line(eqn.source)
        self.local.setdefault(f"random numbers of {where or place_of(eqn)}")

    def _check_drawn(self, eqn: Equation) -> None:
        """Raises an error if a sampler's numbers can be drawn ahead for all rows."""
        assert self._top is not None
        if self.facts.given.issuperset(self._top.outputs):
            raise MicrobatchError(f"{place_of(eqn)} draws for all rows at once.")

    def _rows(self, eqn: Equation, given: list[Split]) -> list[Split]:
        op = self.facts.operators[eqn.index]
        if eqn.primitive == "random_gamma" and given[0].kind is Kind.SAME:
            self._check_drawn(eqn)
            self._fold(eqn, 0)
        found = operators.rows(self.pair, eqn, given, op.rule, self.kernel)
        if isinstance(found, str):
            made = self._couple(eqn, found)
            # The backward pass is linear in the gradients of rows, so results without
            # rows are sums. An equation that recomputes a value of the forward pass
            # gives it the same class as there.
            adds_up = op.role is Role.BACKWARD and REPEATED not in op.module.split("/")
            return [SUM if adds_up and split == LOCAL else split for split in made]
        if SUM in found and eqn.primitive == "scatter-add":
            self.known.as_part(eqn, 0)
        return found

    def _sums(self, eqn: Equation, given: list[Split]) -> list[Split]:
        """Finds the classes of results if an operand is a sum over the microbatches."""
        sums = [k for k, c in enumerate(given) if c.kind is Kind.SUM]
        rows = any(c.kind is Kind.ROWS for c in given)
        settled = rows or any(self.pair.has_rows(v) for v in eqn.outputs)
        linear = None if settled else operators.linear_in(self.pair, eqn, sums)
        if linear is None:
            for slot in sums:
                given[slot] = self.settle(eqn, slot)
            return self._by_classes(eqn, given)
        for slot in [k for k in sums if k not in linear.sums]:
            given[slot] = self.settle(eqn, slot)
        for slot in linear.parts:
            if given[slot].kind is not Kind.SUM:
                self.known.as_part(eqn, slot)
        return [SUM] * len(eqn.outputs)

    def _by_classes(self, eqn: Equation, given: list[Split]) -> list[Split]:
        kinds = {c.kind for c in given}
        if Kind.SUM in kinds:
            return self._sums(eqn, given)
        if Kind.ROWS in kinds:
            return self._rows(eqn, given)
        if any(self.pair.has_rows(v) for v in eqn.outputs):
            return self._rows_of_none(eqn, given)
        return [LOCAL if Kind.LOCAL in kinds else SAME] * len(eqn.outputs)

    def settle(self, eqn: Equation, slot: int) -> Split:
        """Returns the class of a sum over microbatches that a microbatch needs."""
        value = eqn.inputs[slot]
        assert isinstance(value, int)
        origin = self.known.outer.get(value)
        if value in self.facts.given:
            self.known.edits.ahead[eqn.index, slot] = value
            return SAME
        if origin is not None and self.known.source(origin) in self.facts.given:
            self.known.force(origin, SAME)
        self._wait_or_accept(eqn, value, "needs a sum over the batch")
        self.known.edits.scaled[eqn.index, slot] = float(self.pair.count)
        return LOCAL

    def _couple(self, eqn: Equation, why: str) -> list[Split]:
        """Returns the classes of results that couple rows in a way other than a sum."""
        if self._sampling:
            made = map(self.known.of_whole, eqn.outputs)
            return [LOCAL if split == SAME else split for split in made]
        if self.facts.given.issuperset(eqn.outputs):
            return self.known.hoist(eqn.outputs)
        self._wait_or_accept(eqn, None, why)
        # The sum of one microbatch times the number of microbatches estimates the
        # batch's sum.
        if eqn.primitive == "cumsum":
            self.known.edits.scaled[eqn.index, 0] = float(self.pair.count)
        return [
            Split(Kind.ROWS, 1) if self.pair.has_rows(v) else LOCAL for v in eqn.outputs
        ]

    def _wait_or_accept(self, eqn: Equation, value: int | None, why: str) -> None:
        """Makes an equation run once, later, or accepts the microbatch's own value."""
        assert self._top is not None
        if self._top.index not in self.facts.back:
            raise _Late
        if eqn.primitive == "scan":
            raise MicrobatchError(
                f"{place_of(eqn)} {why}: a row needs those before it, and a microbatch "
                "does not have them. No option helps: plan with microbatches=1."
            )
        op = self.facts.operators[eqn.index]
        known = value in self.facts.statistics or (
            op.role is Role.BACKWARD and op.module in self._modules
        )
        others = None if known else taken_from_others(self.pair, eqn, value)
        if not known and others is None:
            others = picked_by_order(self.pair, eqn, self.facts.back)
        if not known and (others is not None or not self.couple):
            if value in self.facts.updated and op.role is not Role.BACKWARD:
                raise MicrobatchError(
                    f"{place_of(eqn)} needs whole gradients, and a backward pass reads "
                    "what it makes: the batch would be gone through more than once."
                )
            raise kernels.CoupledError(eqn, why, op.module, others)
        if op.role is Role.FORWARD or op.module not in self._modules:
            what = (
                "batch statistics" if value in self.facts.statistics else place_of(eqn)
            )
            where = op.module or op.source
            self.local.setdefault(f"{what} of {where}" if where else what)
        self._modules.add(op.module)

    def kernel(
        self, pair: Pair, facts: Facts, given: Sequence[Split]
    ) -> tuple[list[Split], Edits]:
        """Follows the body of a kernel (`autopar_passes.microbatches.kernels`)."""
        inner, body = Follower(pair, facts, 1, couple=False), pair.micro.body
        inner.known.classes.update(zip(body.inputs, given, strict=False))
        for inner._top in body.equations:
            inner.equation(inner._top)
        return [inner.known.of(a) for a in body.outputs], inner.known.edits

    # -- loops and branches ----------------------------------------------------------

    def _until_settled(self, eqn: Equation, look: operators.Look) -> list[Split]:
        while True:
            try:
                return look(eqn)
            except Again as again:
                if again.args != (eqn.index,):
                    raise

    def _enter(self, eqn: Equation, slots: list[int], inputs: list[int]) -> None:
        for slot, value in zip(slots, inputs, strict=True):
            self.known.outer[value] = (eqn, slot)
            self.known.classes[value] = self.known.operand(eqn, slot)

    def _body(self, region: Region) -> list[Split]:
        for eqn in region.equations:
            self.known.edits.forget(eqn.index)
            self.equation(eqn)
        return [self.known.of(a) for a in region.outputs]

    def _loop(
        self, eqn: Equation, region: Region, start: int, carried: list[int], first: int
    ) -> list[Split]:
        """Follows a loop's body until the classes of the carried values are stable.

        Args:
          eqn: the loop.
          region: its body.
          start: the index of the first carried operand of the loop.
          carried: the carried inputs of the body.
          first: the index of the first carried result of the loop.
        """
        now = [self.known.operand(eqn, start + k) for k in range(len(carried))]
        while True:
            self.known.classes.update(zip(carried, now, strict=True))
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
                if self.known.operand(eqn, start + k).kind is not Kind.SUM:
                    self.known.as_part(eqn, start + k)
                if out[first + k].kind is not Kind.SUM:
                    raise MicrobatchError(
                        f"{place_of(eqn)} carries a sum in some turns."
                    )
        return out[:first] + now + out[first + len(now) :]

    def _join(self, eqn: Equation, a: Split, b: Split) -> Split:
        found = join_splits(a, b)
        if found is None:
            raise MicrobatchError(
                f"{place_of(eqn)} makes rows in one case, and none in another."
            )
        return found

    def _scan(self, eqn: Equation) -> list[Split]:
        params, body = eqn.params, eqn.regions[0]
        consts, carry = params["num_consts"], params["num_carry"]
        if self.pair.sources[eqn.index].params["length"] != params["length"]:
            return self._scan_of_rows(eqn)
        rest = [*range(consts), *range(consts + carry, len(eqn.inputs))]
        self._enter(eqn, rest, [body.inputs[k] for k in rest])
        for k in range(consts, consts + carry):
            self.known.outer[body.inputs[k]] = (eqn, k)
        carried = list(body.inputs[consts : consts + carry])
        return self._loop(eqn, body, consts, carried, 0)

    def _scan_of_rows(self, eqn: Equation) -> list[Split]:
        """Finds the classes of a scan over the rows: a map, or a sum over the rows."""
        body = eqn.regions[0]
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        added = added_up(eqn)
        given = [self.known.operand(eqn, k) for k in range(len(eqn.inputs))]
        for slot in range(consts + carry, len(given)):
            if given[slot].kind is Kind.POSITION:
                given[slot] = self.known.numbers(eqn, slot)
        inners = {c.inner for c in given[consts + carry :]} - {0}
        apart = all(c.kind in (Kind.SAME, Kind.LOCAL) for c in given[: consts + carry])
        mapped = all(c.kind is Kind.ROWS for c in given[consts + carry :]) and all(
            self.pair.dims[v] == 0 for v in eqn.outputs[carry:]
        )
        if added is None or not apart or not mapped or len(inners) > 1:
            return self._couple(eqn, "goes through the rows one by one")
        self.known.classes.update((v, SAME) for v in body.inputs)
        if not all(c.kind in (Kind.SAME, Kind.LOCAL) for c in self._body(body)):
            return self._couple(eqn, "goes through the rows one by one")
        for k, adds in enumerate(added):
            if adds:
                self.known.as_part(eqn, consts + k)
        ends = [SUM if adds else given[consts + k] for k, adds in enumerate(added)]
        inner = inners.pop() if inners else 0
        return [*ends, *[Split(Kind.ROWS, inner)] * (len(eqn.outputs) - carry)]

    def _sampler(self, eqn: Equation) -> list[Split]:
        """Follows a loop of `jax.random` that runs until every row has its numbers."""
        self._check_drawn(eqn)
        if Kind.SUM in {self.known.of(a).kind for a in eqn.inputs}:
            return self._couple(eqn, "needs a sum over the batch")
        for slot, atom in enumerate(eqn.inputs):
            if not isinstance(atom, int) or self.known.of(atom).kind is not Kind.SAME:
                continue
            if jax_compat.is_extended(self.pair.micro.values[atom].dtype):
                self._fold(eqn, slot)
                self.known.forced[eqn.index, slot] = LOCAL
        self._sampling = True
        try:
            return self._while_of(eqn)
        finally:
            self._sampling = False

    def _while(self, eqn: Equation) -> list[Split]:
        draws = any(e.primitive in RANDOM for e in eqn.inner)
        if draws and not self._sampling and jax_compat.is_of_random(eqn.source):
            return self._sampler(eqn)
        return self._while_of(eqn)

    def _while_of(self, eqn: Equation) -> list[Split]:
        test, body = eqn.regions
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self._enter(eqn, list(range(n_test)), list(test.inputs[:n_test]))
        slots = list(range(n_test, n_test + n_body))
        self._enter(eqn, slots, list(body.inputs[:n_body]))
        carried = list(body.inputs[n_body:])
        found = self._loop(eqn, body, n_test + n_body, carried, 0)
        self.known.classes.update(zip(test.inputs[n_test:], found, strict=True))
        (again,) = self._body(test)
        kinds = {c.kind for c in found}
        if again.kind is Kind.ROWS and kinds <= {Kind.SAME, Kind.ROWS}:
            # If a loop is mapped over rows, each row leaves the loop independently of
            # the others.
            return found
        if again.kind not in (Kind.SAME, Kind.LOCAL):
            return self._couple(eqn, "goes on until all rows are through")
        return found

    def _cond(self, eqn: Equation) -> list[Split]:
        if self.known.of(eqn.inputs[0]).kind is Kind.SUM:
            self.settle(eqn, 0)
        found: list[Split] | None = None
        slots = list(range(1, len(eqn.inputs)))
        for region in eqn.regions:
            self._enter(eqn, slots, list(region.inputs))
            out = self._body(region)
            if found is not None:
                for a, b in zip(found, out, strict=True):
                    if (a.kind is Kind.SUM) is not (b.kind is Kind.SUM):
                        return self._couple(eqn, "has a sum in one branch only")
                out = [self._join(eqn, a, b) for a, b in zip(found, out, strict=True)]
            found = out
        assert found is not None
        return found
