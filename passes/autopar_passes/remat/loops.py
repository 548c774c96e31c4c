"""Rewrites loops over layers so that their backward loops recompute activations.

JAX differentiates a ``scan`` into two loops. The forward loop stacks the values that
each iteration keeps, its *residuals*. The backward loop reads these stacks. This module
removes the stacks of residuals of chosen iterations from the forward loop. Instead, the
backward loop receives the inputs of the forward loop: its constants, its slices, and
the initial carry of each iteration, which is stacked. From these inputs each iteration
recomputes its residuals, behind an optimization barrier. Without the barrier the
compiler would merge the recomputation with the forward pass.

If only the first iterations are chosen, both loops are split in two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autopar_passes import jax_compat
from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.layer_loops.split import Splitter
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    needed_equations,
    reads,
)
from autopar_passes.program.flatten import (
    Builder,
    barrier_equation,
    next_index,
    renumber_equation,
    renumber_region,
)
from autopar_passes.remat.copies import (
    FULL,
    NEVER,
    RematError,
    add_copies,
    check_level,
    crossing,
    keeps,
    owners,
    recomputed_equations,
)
from autopar_passes.stages.parts import SMALL, Flow


def iterations(
    program: Program, starts: Sequence[int], layers: Collection[int]
) -> dict[int, int]:
    """Returns how many iterations of each loop are recomputed.

    Args:
      program: the step.
      starts: for each layer, the index of the loop that contains it, ascending.
      layers: numbers of the layers to recompute.

    Raises:
      RematError: an index in ``starts`` is not a loop, or does not occur once per
        iteration of the loop, or the chosen iterations are not the first ones.
    """
    by_index = {eqn.index: eqn for eqn in program.body.equations}
    out: dict[int, int] = {}
    for start in dict.fromkeys(starts):
        eqn, count = by_index[start], starts.count(start)
        if eqn.primitive != "scan" or eqn.params["length"] != count:
            raise RematError(
                f"layers must begin at different top-level equations; {count} begin at "
                f"{start}, which is no loop of {count} iterations."
            )
        first = starts.index(start)
        chosen = [k - first for k in sorted(set(layers)) if 0 <= k - first < count]
        if chosen != list(range(len(chosen))):
            raise RematError(
                "the first layers of a loop can be computed again, or all of them; got "
                f"{chosen[:8]} of {count}."
            )
        out[start] = len(chosen)
    return out


def recomputed_in_loops(
    program: Program,
    loops: Mapping[int, int],
    backward: Collection[int],
    level: str,
) -> Program:
    """Returns the program in which chosen iterations recompute their activations.

    Args:
      program: a differentiated step.
      loops: forward loop -> the number of its first iterations to recompute.
      backward: indices of the top-level equations of the backward pass.
      level: the values to keep (`autopar_passes.remat.copies`).

    Raises:
      RematError: no loop of the backward pass reads the residuals of one of these
        loops.
    """
    pairs = {k: _readers(program, k, backward) for k, n in loops.items() if n}
    program, pieces = _divide_loops(program, loops, pairs)
    for loop, readers in pieces.items():
        program = _Loop(program, loop, readers, level).run()
    return program


def _top(program: Program) -> dict[int, Equation]:
    return {eqn.index: eqn for eqn in program.body.equations}


def _first_stack(eqn: Equation) -> int:
    """Returns the position of a loop's first operand that it reads slice by slice."""
    return eqn.params["num_consts"] + eqn.params["num_carry"]


def loops_through(program: Program, eqn: Equation) -> list[int]:
    """Returns the indices of loops that read a loop's stacked results by slices."""
    made = set(eqn.outputs[eqn.params["num_carry"] :])
    return [
        other.index
        for other in program.body.equations
        if other.primitive == "scan"
        and other.params["length"] == eqn.params["length"]
        and made.intersection(other.inputs[_first_stack(other) :])
    ]


def _readers(program: Program, loop: int, backward: Collection[int]) -> tuple[int, ...]:
    """The backward loops that read a forward loop's stacked results slice by slice."""
    eqn = _top(program)[loop]
    found = tuple(k for k in loops_through(program, eqn) if k in backward)
    if not found:
        raise RematError(
            f"the backward pass does not go through the loop at "
            f"{jax_compat.source_line(eqn.source)} again."
        )
    return found


def _divide_loops(
    program: Program,
    loops: Mapping[int, int],
    pairs: Mapping[int, tuple[int, ...]],
) -> tuple[Program, dict[int, tuple[int, ...]]]:
    """Splits loops in two if only their first iterations are recomputed.

    Returns:
      The program, and a map from each forward loop to its backward loops, for the loops
      whose iterations are recomputed.
    """
    top = _top(program)
    cuts = _cuts(top, loops, pairs)
    if not cuts:
        return program, dict(pairs)
    splitter = Splitter(program, {})
    chosen: dict[int, int] = {}
    for eqn in program.body.equations:
        splitter.stack = eqn.name_stack
        if eqn.index in cuts:
            sizes, which = cuts[eqn.index]
            chosen[eqn.index] = splitter.cut(eqn, sizes)[which]
        else:
            whole = tuple(splitter.read(a) for a in eqn.inputs)
            splitter.builder.equations.append(dataclasses.replace(eqn, inputs=whole))
    divided = _with_results(splitter, [v for k in cuts for v in top[k].outputs])
    found = {
        chosen.get(k, k): tuple(chosen.get(r, r) for r in readers)
        for k, readers in pairs.items()
    }
    return divided, found


def _cuts(
    top: Mapping[int, Equation],
    loops: Mapping[int, int],
    pairs: Mapping[int, tuple[int, ...]],
) -> dict[int, tuple[tuple[int, int], int]]:
    """Loop -> the sizes of its two parts, and which of the parts is recomputed."""
    out: dict[int, tuple[tuple[int, int], int]] = {}
    for loop, readers in pairs.items():
        length, count = top[loop].params["length"], loops[loop]
        if count == length:
            continue
        late = bool(top[loop].params["reverse"])
        sizes = (length - count, count) if late else (count, length - count)
        for k in (loop, *readers):
            if out.setdefault(k, (sizes, int(late))) != (sizes, int(late)):
                raise RematError("a backward loop goes through several forward loops.")
    return out


def _with_results(splitter: Splitter, values: Collection[int]) -> Program:
    """The program of a splitter, with new value numbers for the results of split loops.

    Args:
      splitter: a splitter that has processed all equations of its program.
      values: results of the loops that were split.
    """
    body = splitter.program.body
    outputs = tuple(splitter.read(a) for a in body.outputs)
    own = {splitter.whole[v]: v for v in values if v in splitter.whole}

    def number(value: int) -> int:
        return own.get(value, value)

    whole = Region(body.inputs, tuple(splitter.builder.equations), outputs)
    region = renumber_region(whole, number)
    made = tuple(splitter.builder.values)
    return Program(made, region, splitter.program.constants)


class _Loop:
    """Rewrites one forward loop and the backward loops that read its stacked values."""

    def __init__(
        self, program: Program, loop: int, readers: Sequence[int], level: str
    ) -> None:
        self.program = program
        self.numbers = Builder(program.values, next_index(program))
        top = _top(program)
        self.forward = top[loop]
        self.readers = [top[k] for k in readers]
        self.level = level
        self.body = self.forward.regions[0]
        self.maker = {v: e for e in self.body.equations for v in e.outputs}
        carries = self.forward.params["num_carry"]
        # Stacked value -> the value of one iteration that is stacked.
        self.stacks: dict[int, Atom] = dict(
            zip(
                self.forward.outputs[carries:], self.body.outputs[carries:], strict=True
            )
        )

    def run(self) -> Program:
        dropped = self.dropped_stacks()
        if not dropped:
            return self.program
        changed = {r.index: self.backward(r, dropped) for r in self.readers}
        changed[self.forward.index] = self.without(dropped)
        body = self.program.body
        equations = tuple(changed.get(e.index, e) for e in body.equations)
        region = dataclasses.replace(body, equations=equations)
        return dataclasses.replace(
            self.program, values=tuple(self.numbers.values), body=region
        )

    def is_kept(self, value: int) -> bool:
        """Whether an iteration keeps a value, or receives the value as an input."""
        maker = self.maker.get(value)
        if maker is None or maker.source.effects or maker.primitive in NEVER:
            return True
        like = self.program.values[value]
        if like.size <= SMALL or jax_compat.is_extended(like.dtype):
            return True
        return keeps(self.level, maker, value, self.program.values)

    def dropped_stacks(self) -> dict[int, int]:
        """Finds the stacks that no equation needs after the rewrite.

        Maps each stack to the value of one iteration that the loop stacks.
        """
        first = {r.index: _first_stack(r) for r in self.readers}
        read = {a for a in self.program.body.outputs if isinstance(a, int)}
        for eqn in self.program.body.equations:
            # A stack that is read in any other way than slice by slice must be kept.
            read.update(
                a
                for a in (
                    eqn.inputs[: first[eqn.index]] if eqn.index in first else reads(eqn)
                )
                if isinstance(a, int)
            )
        return {
            stack: value
            for stack, value in self.stacks.items()
            if isinstance(value, int) and not self.is_kept(value) and stack not in read
        }

    def source(self, value: int) -> tuple[Atom, bool]:
        """The operand that gives a backward loop a value, and whether it is a stack."""
        if value in self.body.inputs:
            place = self.body.inputs.index(value)
            if place < self.forward.params["num_consts"]:
                return self.forward.inputs[place], False
            if place >= _first_stack(self.forward):
                return self.forward.inputs[place], True
        for stack, known in self.stacks.items():
            if known == value:
                return stack, True
        like = self.program.values[value]
        length = self.forward.params["length"]
        shape = (length, *like.shape)
        stack = self.numbers.like(dataclasses.replace(like, shape=shape))
        self.stacks[stack] = value
        return stack, True

    def backward(self, eqn: Equation, dropped: Mapping[int, int]) -> Equation:
        """Rewrites a backward loop to recompute the values of the dropped stacks."""
        first, consts = _first_stack(eqn), eqn.params["num_consts"]
        body = eqn.regions[0]
        operands = dict(zip(body.inputs, eqn.inputs, strict=True))
        gone = {
            inner: dropped[a]
            for inner in body.inputs[first:]
            if isinstance(a := operands[inner], int) and a in dropped
        }
        if not gone:
            return eqn
        equations, given = recomputed_equations(
            self.body.equations, gone.values(), self.is_kept
        )
        inside, more = self.operands(eqn, operands, given)
        gates = _gates(body, gone, body.inputs[consts:first])
        again, instead = self.again(eqn, equations, inside, gates)
        instead.update({inner: instead[value] for inner, value in gone.items()})
        renamed = {v: instead[v] for v in (*gone, *gates)}
        whole = dataclasses.replace(body, inputs=())
        rest = renumber_region(whole, lambda v: renamed.get(v, v))
        left = [v for v in body.inputs[first:] if v not in gone]
        inputs = (
            *body.inputs[:consts],
            *more[False],
            *body.inputs[consts:first],
            *left,
            *more[True],
        )
        operands |= more[False] | more[True]
        return dataclasses.replace(
            eqn,
            source=_with_params(eqn, num_consts=consts + len(more[False])),
            inputs=tuple(operands[v] for v in inputs),
            regions=(Region(inputs, (*again, *rest.equations), rest.outputs),),
        )

    def operands(
        self, eqn: Equation, known: Mapping[int, Atom], given: Sequence[int]
    ) -> tuple[dict[int, int], tuple[dict[int, Atom], dict[int, Atom]]]:
        """Returns the inputs that a backward loop receives from the forward loop.

        Args:
          eqn: the backward loop.
          known: input of the loop's body -> its operand.
          given: the values of the forward loop's body that the backward loop needs.

        Returns:
          Two items. The first maps a value to the input of the backward body that holds
          it. The second maps new inputs to their operands: the constants, then the
          stacks.
        """
        first, consts = _first_stack(eqn), eqn.params["num_consts"]
        own, inputs = dict[int, int](), eqn.regions[0].inputs
        more: tuple[dict[int, Atom], dict[int, Atom]] = {}, {}
        for value in given:
            atom, stacked = self.source(value)
            among = inputs[first:] if stacked else inputs[:consts]
            same = [v for v in among if known[v] == atom]
            own[value] = (
                same[0] if same else self.numbers.like(self.program.values[value])
            )
            if not same:
                more[stacked][own[value]] = atom
        return own, more

    def again(
        self,
        eqn: Equation,
        equations: Sequence[Equation],
        inside: Mapping[int, int],
        gates: Sequence[int],
    ) -> tuple[list[Equation], dict[int, int]]:
        """Copies equations behind a barrier, to recompute their results.

        Args:
          eqn: the backward loop.
          equations: the equations of the forward loop to copy.
          inside: value that the copies read -> the backward loop's input that holds it.
          gates: gradients that must arrive before an iteration starts to recompute.

        Returns:
          The barrier and the copies, and a map from each value to its copy. Each
          gradient of ``gates`` maps to its value after the barrier.
        """
        through = [*dict.fromkeys((*inside.values(), *gates))]
        types = [self.numbers.values[v] for v in through]
        behind = {v: self.numbers.like(t) for v, t in zip(through, types, strict=True)}
        barrier = Equation(
            self.numbers.index(),
            barrier_equation(types),
            tuple(through),
            tuple(behind.values()),
            eqn.name_stack,
        )
        start = {value: behind[inner] for value, inner in inside.items()}
        made, copy = add_copies(self.numbers, equations, start)
        found = {v: copy(v) for e in equations for v in e.outputs} | start
        return [barrier, *made], found | {v: behind[v] for v in gates}

    def without(self, dropped: Collection[int]) -> Equation:
        """The forward loop without the dropped stacks, and with the added stacks."""
        carries = self.forward.params["num_carry"]
        left = {v: a for v, a in self.stacks.items() if v not in dropped}
        outputs = (*self.body.outputs[:carries], *left.values())
        live = needed_equations(self.body.equations, outputs, effects=True)
        body = Region(self.body.inputs, live, outputs)
        return dataclasses.replace(
            self.forward,
            outputs=(*self.forward.outputs[:carries], *left),
            regions=(body,),
        )


def _gates(body: Region, gone: Collection[int], carries: Sequence[int]) -> list[int]:
    """Returns the carried gradients that a recomputation must wait for.

    An iteration must wait for the carried gradients that the first reader of a dropped
    value reads.
    """
    for eqn in body.equations:
        found = reads(eqn)
        if not set(gone).isdisjoint(found):
            return [v for v in carries if v in found]
    return []


def _with_params(eqn: Equation, **changed: int) -> object:
    """Returns the JAX equation of a loop with changed parameters."""
    return eqn.source.replace(params={**eqn.params, **changed})


# Rewrites a step so that its backward pass recomputes activations.
#
# The backward pass of a chosen layer reads copies of the layer's values. The copies
# are computed from the layer's inputs, behind an optimization barrier, as in
# ``jax.checkpoint``. Without the barrier the compiler would merge the copies with the
# forward pass. A gradient that enters the backward pass of the layer also passes
# through the barrier. The recomputation therefore cannot start before it is needed.
#
# The forward pass is unchanged, including its side effects, its auxiliary results and
# its new state. Random numbers are drawn again from the same keys.


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """The layers that the backward pass recomputes, and the values that it keeps.

    Attributes:
      starts: the forward equation at which each layer begins, ascending
        (`autopar_passes.stages.layers.cluster_layers`). If each iteration of a forward
        loop is a layer, the loop's index is repeated for each iteration.
      layers: numbers of the layers whose activations are recomputed.
      level: ``full`` keeps only those values of such a layer that other layers read.
        ``dots`` also keeps the results of convolutions, and of matrix products without
        batch dimensions, as
        ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable`` does. ``kernels``
        keeps the results of attention kernels. ``names=a,b`` keeps the values that the
        step names by `jax.ad_checkpoint.checkpoint_name`.
    """

    starts: tuple[int, ...]
    layers: tuple[int, ...]
    level: str = FULL


def recompute_layers(
    program: Program,
    graph: OperatorGraph,
    wanted: Recomputation,
    batch: Collection[int],
) -> Program:
    """Returns the program in which chosen layers recompute their activations.

    Values and equations of the program keep their numbers; new ones get higher numbers.

    Args:
      program: a differentiated step, of the whole batch or of one microbatch.
      graph: the operator graph of the program.
      wanted: the layers to recompute.
      batch: the input values that hold the batch.

    Raises:
      RematError: there is no such layer or level, or the starts are not different
        top-level equations, or a loop cannot be rewritten.
    """
    flow = Flow(program, graph, frozenset(batch), update_equations(program, graph))
    _check(flow, wanted)
    if len(set(wanted.starts)) < len(wanted.starts):
        loops = iterations(program, wanted.starts, wanted.layers)
        backward = {k for k, role in flow.roles.items() if role is Role.BACKWARD}
        return recomputed_in_loops(program, loops, backward, wanted.level)
    return _Rewriter(flow, wanted).run()


def _check(flow: Flow, wanted: Recomputation) -> None:
    check_level(flow.program, wanted.level)
    starts = list(wanted.starts)
    if starts != [k for k in flow.equations for _ in range(starts.count(k))]:
        raise RematError(
            "layers must begin at different top-level equations, in their order; got "
            f"{starts[:8]}."
        )
    if missing := [k for k in wanted.layers if not 0 <= k < len(starts)]:
        raise RematError(f"layer {missing[0]}: there are {len(starts)} layers, from 0.")


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerAgain:
    """The recomputation of one layer.

    Attributes:
      place: the position in the program where the recomputation is inserted: that of
          the first backward equation that reads a recomputed value.
      values: the recomputed values that are read.
      equations: the equations that compute them, in order.
      given: the values that these equations read.
      gates: incoming gradients that must be computed before the recomputation starts.
    """

    place: int
    values: frozenset[int]
    equations: tuple[Equation, ...]
    given: tuple[int, ...]
    gates: tuple[int, ...]


class _Rewriter:
    def __init__(self, flow: Flow, wanted: Recomputation) -> None:
        self.flow = flow
        self.wanted = wanted
        self.order = tuple(flow.equations.values())
        self.position = {eqn.index: k for k, eqn in enumerate(self.order)}
        self.owner = owners(flow, wanted.starts)
        self.crossing = crossing(flow, self.owner)
        self.numbers = Builder(flow.program.values, next_index(flow.program))

    def run(self) -> Program:
        found = {k: self.again(k) for k in sorted(set(self.wanted.layers))}
        before: dict[int, list[_LayerAgain]] = {}
        for one in found.values():
            if one is not None:
                before.setdefault(one.place, []).append(one)
        renamed: dict[int, int] = {}
        out: list[Equation] = []
        for place, eqn in enumerate(self.order):
            for one in before.get(place, ()):
                out.extend(self.copies(one, renamed))
            out.append(self.reading(eqn, renamed))
        body = self.flow.program.body
        region = Region(body.inputs, tuple(out), body.outputs)
        return Program(tuple(self.numbers.values), region, self.flow.program.constants)

    def backward(self, eqn: Equation) -> bool:
        return self.flow.roles[eqn.index] is Role.BACKWARD

    def keeps_value(self, value: int) -> bool:
        """Whether the backward pass reads the forward pass's own result for a value."""
        maker = self.flow.maker.get(value, -1)
        if self.owner.get(maker) not in self.wanted.layers:
            return True
        if value in self.crossing or self.flow.small(value):
            return True
        eqn, values = self.flow.equations[maker], self.flow.program.values
        return keeps(self.wanted.level, eqn, value, values)

    def again(self, layer: int) -> _LayerAgain | None:
        """Returns the recomputation of a layer; None if the layer needs none."""
        made = {
            v
            for index, own in self.owner.items()
            if own == layer
            for v in self.flow.equations[index].outputs
            if not self.keeps_value(v)
        }
        users = [
            eqn
            for eqn in self.order
            if self.backward(eqn) and not made.isdisjoint(reads(eqn))
        ]
        if not users:
            return None
        place = self.position[users[0].index]
        # A forward pass that comes later in the program (a second one) has no values at
        # this place.
        wanted = {
            v
            for eqn in users
            for v in reads(eqn)
            if v in made and self.made_at(v) < place
        }
        equations, given = recomputed_equations(
            self.order[:place], wanted, self.keeps_value
        )
        return _LayerAgain(
            place, frozenset(wanted), equations, given, self.gates(users, place)
        )

    def made_at(self, value: int) -> int:
        """Position of the equation that computes a value; -1 for inputs."""
        return self.position.get(self.flow.maker.get(value, -1), -1)

    def gates(self, users: Sequence[Equation], place: int) -> tuple[int, ...]:
        """Returns the incoming gradients that a recomputation waits for.

        A recomputation waits for gradients computed before ``place``. They are read by
        the first of ``users`` that has an operand of this kind.

        Args:
          users: equations of the backward pass that read a recomputed value, in order.
          place: a position in the program.
        """
        for eqn in users:
            found = [
                v
                for v in reads(eqn)
                if (maker := self.flow.maker.get(v)) is not None
                and self.backward(self.flow.equations[maker])
                and self.made_at(v) < place
            ]
            if found:
                return tuple(dict.fromkeys(found))
        return ()

    def copies(self, one: _LayerAgain, renamed: dict[int, int]) -> list[Equation]:
        """Returns the barrier and the copied equations after the barrier.

        Args:
          one: the recomputation of one layer.
          renamed: value -> the value that later backward equations read instead;
            extended by this call.
        """
        through = [*one.given, *(v for v in one.gates if v not in one.given)]
        actual = [renamed.get(v, v) if v in one.gates else v for v in through]
        types = [self.flow.value(v) for v in through]
        inside = {v: self.numbers.like(t) for v, t in zip(through, types, strict=True)}
        barrier = Equation(
            self.numbers.index(),
            barrier_equation(types),
            tuple(actual),
            tuple(inside.values()),
            self.order[one.place].name_stack,
        )
        made, copy = add_copies(self.numbers, one.equations, inside)
        renamed.update({v: copy(v) for v in one.values})
        renamed.update({v: inside[v] for v in one.gates})
        return [barrier, *made]

    def reading(self, eqn: Equation, renamed: dict[int, int]) -> Equation:
        """Returns an equation; in the backward pass it reads the recomputed values."""
        if not self.backward(eqn) or renamed.keys().isdisjoint(reads(eqn)):
            return eqn
        return renumber_equation(eqn, lambda v: renamed.get(v, v))
