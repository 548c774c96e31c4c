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

Rows of the batch that are mixed before the model reads them (reversed, permuted, drawn)
are computed from the whole batch ahead, too. A microbatch takes its rows of the result.
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
from autopar_passes.program.equations import Atom, Equation, Region, Scalar, walk
from autopar_passes.sums.stacked import ADDITIONS

# Loops that go through the rows of a batch: each turn takes a row of its own.


def added_up(eqn: Equation) -> list[bool] | None:
    """How a scan carries what it does; None: one row depends on those before it.

    The transpose of a map over rows adds up gradients, each turn those of its row.

    Returns:
      For each carried value, whether turns add to it; others stay as they begin, and
      may be read.
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
    """Whether a region makes ``end`` of a value by adding to it, and nothing else."""
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
    """Whether an equation converts a value to the dtype that it has."""
    (given,) = eqn.source.invars[:1]
    kind = eqn.primitive == "convert_element_type"
    return kind and given.aval.dtype == eqn.params["new_dtype"]


# What is known of the values of a program while it is followed.


class Again(Exception):  # no error: it starts a loop anew
    """A loop must be looked at again: what enters it has another class."""


class Known:
    """The classes of values, and what is changed for them.

    Attributes:
      classes: of the values that were met.
      edits: what is changed in the program of a microbatch.
      outer: inputs of regions -> the equation and operand that they come from.
      forced: operands that are of another class than the value which they read.
    """

    def __init__(self, pair: Pair, facts: Facts, unit: int) -> None:
        """Knows the classes of the inputs.

        Args:
          pair: the programs.
          facts: of the step.
          unit: how many rows of the batch are dealt out together.
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
        for value in pair.micro.body.inputs[pair.micro.num_arguments :]:
            self.classes[value] = self.of_whole(value)
            if self.classes[value] != SAME:
                self.edits.replaced.add(value)

    def of(self, atom: Atom) -> Split:
        """The class of an atom."""
        return SAME if isinstance(atom, Scalar) else self.classes[atom]

    def operand(self, eqn: Equation, slot: int) -> Split:
        """The class of an operand, with what was found to be needed of it."""
        return self.forced.get((eqn.index, slot), self.of(eqn.inputs[slot]))

    def hoist(self, values: Sequence[int]) -> list[Split]:
        """Has values computed from the whole batch ahead; returns their classes."""
        self.edits.replaced.update(values)
        self.classes.update((v, self.of_whole(v)) for v in values)
        return [self.classes[v] for v in values]

    def of_whole(self, value: int) -> Split:
        """What a microbatch has of a value that is computed from the whole batch."""
        if self.pair.dims[value] < -1:
            return WHOLE
        if not self.pair.has_rows(value):
            return SAME
        return Split(Kind.ROWS, self.adjacent(value))

    def adjacent(self, value: int) -> int:
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
                f"{place_of(eqn)} adds what no microbatch has a part of."
            )

    def numbers(self, eqn: Equation, slot: int) -> Split:
        """The numbers of a microbatch's rows, taken from those of the whole batch."""
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
        """Has an operand of a loop computed ahead, and the loop looked at again."""
        loop, slot = origin
        self.forced[loop.index, slot] = split
        self.edits.ahead[loop.index, slot] = self.source(origin)
        raise Again(loop.index)

    def source(self, origin: tuple[Equation, int]) -> int:
        """The value that an input of a region comes from; -1: a scalar."""
        atom = origin[0].inputs[origin[1]]
        return atom if isinstance(atom, int) else -1


class _Late(Exception):  # no error: it ends the look at an equation
    """An equation needs whole values, and can wait for them."""


class Follower:
    """Follows the classes of values through one program."""

    def __init__(
        self,
        pair: Pair,
        facts: Facts,
        unit: int,
        *,
        couple: bool,
        hoisted: frozenset[int] = frozenset(),
    ) -> None:
        """Knows the classes of the inputs.

        Args:
          pair: the programs.
          facts: of the step.
          unit: how many rows of the batch are dealt out together.
          couple: whether everything that couples the batch is computed from each
            microbatch alone.
          hoisted: top-level equations that are computed from the whole batch ahead.
        """
        self.pair = pair
        self.facts = facts
        self.couple = couple
        self.hoisted = hoisted
        self.known = Known(pair, facts, unit)
        self.once: set[int] = set()
        self.local: dict[str, None] = {}
        self._modules: set[str] = set()
        self._top: Equation | None = None
        # Within a sampler, which draws again for the rows that it has not accepted.
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
            late = not after.isdisjoint(a for a in eqn.inputs if isinstance(a, int))
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
        """Has the numbers of rows counted over all rows where an equation runs once."""
        body = self.pair.micro.body
        late = [e.inputs for e in body.equations if e.index in self.once]
        read = [a for atoms in (*late, body.outputs) for a in atoms]
        self.known.edits.counted.update(
            a
            for a in read
            if isinstance(a, int) and self.known.classes.get(a) == POSITION
        )

    def _calls_once(self, eqn: Equation) -> bool:
        """Whether the host is called once, with what the whole batch makes.

        A loop over rows calls it for those of each microbatch.
        """
        if not eqn.regions:
            return True
        kinds = {self.known.of(a).kind for a in eqn.inputs if a in self.known.classes}
        return Kind.SUM in kinds and not self._reads_rows(eqn)

    def _in_microbatches(self, eqn: Equation) -> bool:
        """Finds the classes of a top-level equation's results; False: it waits."""
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
        """Whether an equation reads rows, such as the gradient of each of them."""
        read = [a for a in eqn.inputs if isinstance(a, int)]
        return any(
            v in self.known.classes and self.known.classes[v].kind is Kind.ROWS
            for v in read
        )

    def _forget(self, eqn: Equation) -> None:
        self.known.edits.forget(eqn.index)
        for region in eqn.regions:
            for inner in walk(region):
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
        """Checks that a microbatch has a part of all that an equation is about."""
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
        if eqn.primitive == "iota" or Kind.POSITION in kinds:
            return self._positions(eqn, given)
        if Kind.ROWS not in kinds and operators.is_moved(self.pair, eqn):
            return self._couple(eqn, "counts the rows")
        return self._by_classes(eqn, given)

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
        """Values with rows are made of values without."""
        if eqn.primitive in RANDOM:
            if eqn.primitive not in operators.FOLDED:
                return self._couple(eqn, "draws random numbers for rows")
            return [self._draw(eqn, given[0])]
        if eqn.primitive not in operators.SPREADING:
            return self._couple(eqn, "makes rows that differ")
        return [ANY_ROWS]

    def _draw(self, eqn: Equation, key: Split) -> Split:
        """Random numbers for rows: those of the whole batch, if they can be had."""
        inner = self.known.adjacent(eqn.outputs[0])
        of = eqn.inputs[0]
        if key.kind is Kind.SAME and isinstance(of, int):
            if can_draw(eqn, self.pair.micro.values[of].dtype):
                self.known.edits.drawn[eqn.index] = inner
            else:
                self._fold(eqn, 0)
        return Split(Kind.ROWS, inner)

    def _fold(self, eqn: Equation, slot: int) -> None:
        """Gives each microbatch a key of its own."""
        self.known.edits.folded.add((eqn.index, slot))
        where = module_path(eqn.name_stack) or jax_compat.source_line(eqn.source)
        self.local.setdefault(f"random numbers of {where or place_of(eqn)}")

    def _check_drawn(self, eqn: Equation) -> None:
        """Has numbers drawn ahead, all at once, where a sampler can."""
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
            # What a backward pass makes of rows is linear in their gradients: it adds
            # up. What it only computes again is as it was in the forward pass.
            adds_up = op.role is Role.BACKWARD and REPEATED not in op.module.split("/")
            return [SUM if adds_up and split == LOCAL else split for split in made]
        if SUM in found and eqn.primitive == "scatter-add":
            self.known.as_part(eqn, 0)
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
        """The class of a sum that is needed before all microbatches are through."""
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
        """The classes of results that depend on several rows in another way."""
        if self._sampling:
            made = map(self.known.of_whole, eqn.outputs)
            return [LOCAL if split == SAME else split for split in made]
        if self.facts.given.issuperset(eqn.outputs):
            return self.known.hoist(eqn.outputs)
        self._wait_or_accept(eqn, None, why)
        if eqn.primitive == "cumsum":  # as a sum, an estimate of that of the batch
            self.known.edits.scaled[eqn.index, 0] = float(self.pair.count)
        return [
            Split(Kind.ROWS, 1) if self.pair.has_rows(v) else LOCAL for v in eqn.outputs
        ]

    def _wait_or_accept(self, eqn: Equation, value: int | None, why: str) -> None:
        """Lets an equation wait for the whole batch, or takes the microbatch for it."""
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
        """Goes through a body until the classes of what it carries stay.

        Args:
          eqn: the loop.
          region: its body.
          start: the first of its operands that is carried.
          carried: the inputs of the body that are carried.
          first: the first of its results that is carried.
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
        """A scan whose turns are the rows: a map, or what adds up over them."""
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
        """A loop of `jax.random` that goes on until all rows have their numbers."""
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
        draws = any(e.primitive in RANDOM for r in eqn.regions for e in walk(r))
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
            return found  # A loop that is mapped over rows ends for each by itself.
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
