"""The analysis of a step whose backward pass recomputes layers."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter

from autopar.errors import PlanError
from autopar.plans.records import AS_WRITTEN, Rematerialisation
from autopar.progress import say
from autopar.steps.analysis import Analysis, analyse_again
from autopar.steps.microbatches import in_microbatches, one_microbatch
from autopar.steps.padding import padded_whole
from autopar_passes.graph.operators import PRODUCTS, update_equations
from autopar_passes.graph.roles import REPEATED, Role
from autopar_passes.microbatches.accumulate import accumulate_step
from autopar_passes.microbatches.facts import Microbatched
from autopar_passes.program.equations import Equation, Program, reads
from autopar_passes.remat.copies import (
    KERNELS,
    RematError,
    has_attention_kernel,
    names_in,
    trace_without_checkpoints,
)
from autopar_passes.remat.kernels import keep_kernels
from autopar_passes.remat.loops import Recomputation, loops_through, recompute_layers
from autopar_passes.stages.layers import ForwardChain, cluster_layers, forward_chain
from autopar_passes.stages.parts import Flow

# If the loops have more than this fraction of the forward FLOPs, their iterations are
# the step's layers.
_LOOP = 0.5


def rematerialise(
    analysis: Analysis,
    remat: Rematerialisation = AS_WRITTEN,
    count: int = 1,
    *,
    couple: bool = False,
) -> Analysis:
    """Returns the analysis of a step in microbatches that recomputes layers.

    The program takes the whole batch. It is planned and run like any other program. In
    a loop over microbatches, each iteration recomputes its own activations.

    Args:
      analysis: the analysis of the step. If the step was rewritten already, its
        analysis as the user wrote it is used.
      remat: the layers that are recomputed.
      count: number of microbatches.
      couple: see `autopar.steps.microbatches.in_microbatches`.

    Raises:
      PlanError: the step cannot be split or rewritten in this way, with the reason.
    """
    base = as_said(analysis, remat)
    split = in_microbatches(base, count, couple=couple)
    if not remat.layers:
        return split
    key = "remat", count, couple, remat
    return base.remember(key, lambda: _rewritten(base, remat, count, couple=couple))


def as_said(analysis: Analysis, remat: Rematerialisation) -> Analysis:
    """Returns the step on the whole batch, with or without its own ``jax.checkpoint``.

    Raises:
      PlanError: the checkpoints cannot be dropped, or cannot keep attention kernels.
    """
    whole = analysis.whole or analysis
    written = whole.written or whole
    if remat.checkpoints and remat.level == KERNELS:
        return _with_kernels(written, needed=not remat.layers)
    if remat.checkpoints:
        return written
    make = functools.partial(_without_checkpoints, written)
    return written.remember("without checkpoints", make)


def repeats_kernels(analysis: Analysis) -> bool:
    """Whether a ``jax.checkpoint`` of a step computes an attention kernel again."""
    whole = analysis.whole or analysis
    written = whole.written or whole
    return _kernels_kept(written) is not written


def _with_kernels(written: Analysis, *, needed: bool) -> Analysis:
    """Returns the analysis of the step whose checkpoints keep attention kernels.

    Args:
      written: the analysis of the step as it is written.
      needed: whether a step whose checkpoints repeat no kernel is an error.

    Raises:
      PlanError: no checkpoint of the step repeats an attention kernel.
    """
    found = _kernels_kept(written)
    if needed and found is written:
        raise PlanError(
            f"{written.pytrees.name}: remat='0:{KERNELS}': no jax.checkpoint of the "
            "step computes an attention kernel again. Leave remat out, or give a "
            f"number of layers, such as 'all:{KERNELS}'."
        )
    return found


def _kernels_kept(written: Analysis) -> Analysis:
    """Returns the same analysis if the step's checkpoints repeat no kernel."""

    def make() -> Analysis:
        start, traced = time.perf_counter(), written.pytrees
        program = keep_kernels(traced.program)
        if program is traced.program or written.origin is None:
            return written
        say("keeping the results of attention kernels")
        kept = Rematerialisation(level=KERNELS)
        traced = dataclasses.replace(traced, program=program)
        return analyse_again(written, traced, start, written=written, remat=kept)

    return written.remember("kernels kept", make)


def _without_checkpoints(written: Analysis) -> Analysis:
    """Returns the analysis of the step without its ``jax.checkpoint`` calls."""
    name, origin = written.pytrees.name, written.origin
    if origin is None:
        raise PlanError(f"{name}: remat='none' needs a step, not a program alone.")
    start = time.perf_counter()
    say("dropping the checkpoints of the step")
    try:
        traced = trace_without_checkpoints(origin.step, origin.call)
    except RematError as error:
        raise PlanError(f"{name}: remat='none': {error}") from error
    dropped = Rematerialisation(checkpoints=False)
    return analyse_again(written, traced, start, written=written, remat=dropped)


def _rewritten(
    base: Analysis, remat: Rematerialisation, count: int, *, couple: bool
) -> Analysis:
    start = time.perf_counter()
    say(f"computing {len(remat.layers)} of {len(remat.starts)} layers again")
    micro = one_microbatch(base, count, couple=couple)
    found = micro.split
    assert found is not None
    wanted = Recomputation(remat.starts, remat.layers, remat.level)
    try:
        program = recompute_layers(
            micro.program, micro.graph, wanted, _batch_values(micro, found)
        )
    except RematError as error:
        raise PlanError(
            f"{base.pytrees.name}: its layers cannot be computed again: {error}"
        ) from error
    split = None if count == 1 else _with_program(found, program)
    traced = (
        dataclasses.replace(base.pytrees, program=program)
        if split is None
        else accumulate_step(padded_whole(base, count).pytrees, split)
    )
    return analyse_again(base, traced, start, split=split, whole=base, remat=remat)


def _with_program(found: Microbatched, program: Program) -> Microbatched:
    """Returns the split of a step with another program for each microbatch."""
    traced = dataclasses.replace(found.traced, program=program)
    return dataclasses.replace(found, traced=traced)


def _batch_values(micro: Analysis, found: Microbatched) -> frozenset[int]:
    return frozenset(micro.graph.inputs[k].value for k in found.batch)


def layer_starts(
    analysis: Analysis, count: int = 1, *, couple: bool = False
) -> tuple[int, ...]:
    """Returns the forward equation at which each layer of a step begins.

    Args:
      analysis: see `rematerialise`.
      count: number of microbatches. The equations are those of the program of one
        microbatch.
      couple: see `rematerialise`.

    Raises:
      PlanError: the step has no layers that can be recomputed, with the reason.
    """
    micro = one_microbatch(analysis, count, couple=couple)
    return micro.remember("layers", lambda: _found_layers(micro))


def _found_layers(micro: Analysis) -> tuple[int, ...]:
    assert micro.split is not None
    batch = _batch_values(micro, micro.split)
    name = micro.pytrees.name
    chain = forward_chain(micro.program, micro.graph, batch)
    if loops := _layer_loops(micro, chain, batch):
        return tuple(eqn.index for eqn in loops for _ in range(eqn.params["length"]))
    starts = cluster_layers(micro.program, micro.graph, batch=batch)
    if not starts:
        raise PlanError(
            f"{name}: it has no layers to compute again: nothing in its forward pass "
            "depends on both the state and the batch."
        )
    return starts


def named_values(
    analysis: Analysis, count: int = 1, *, couple: bool = False
) -> tuple[str, ...]:
    """Returns the sorted names that a step gives by `checkpoint_name` of JAX.

    Args:
      analysis: see `rematerialise`.
      count: number of microbatches.
      couple: see `rematerialise`.
    """
    micro = one_microbatch(analysis, count, couple=couple)
    return tuple(name for name in names_in(micro.program) if "," not in name)


def has_kernels(analysis: Analysis) -> bool:
    """Whether a step has attention kernels whose results a layer can keep."""
    whole = analysis.whole or analysis
    make = functools.partial(has_attention_kernel, whole.program)
    return whole.remember("attention kernels", make)


def _layer_loops(
    micro: Analysis, chain: ForwardChain, batch: frozenset[int]
) -> list[Equation]:
    """Returns the loops whose iterations are layers, or [] if they are too small.

    Together these loops must have more than half of the forward FLOPs. A loop of the
    backward pass reads the arrays that such a loop stacks. A loop without such a
    backward loop has no gradients, such as a loop in a teacher model. Such loops are
    left out, and their FLOPs do not count. If the same loop occurs several times, it is
    a part of each layer, unless it runs over stacked layers itself.
    """
    times = Counter(chain.classes)
    top = {eqn.index: eqn for eqn in micro.program.body.equations}
    backward = {op.equation for op in micro.graph.operators if op.role is Role.BACKWARD}
    flow = Flow(
        micro.program,
        micro.graph,
        batch,
        update_equations(micro.program, micro.graph),
    )
    found: dict[int, float] = {}
    total = float(chain.work.sum())
    for index, work, classes in zip(
        chain.equations, chain.work, chain.classes, strict=True
    ):
        eqn = top[index]
        if eqn.primitive != "scan" or eqn.params["length"] == 1:
            continue
        if not backward.intersection(loops_through(micro.program, eqn)):
            total -= float(work)
        elif times[classes] == 1 or _is_tower(flow, eqn):
            found[index] = float(work)
    most = sum(found.values()) > _LOOP * total
    return [top[index] for index in found] if most else []


def _is_tower(flow: Flow, eqn: Equation) -> bool:
    """Whether the iterations of a loop are stacked layers.

    A loop over stacked layers reads slices of the state, and each iteration computes a
    matrix product with the result of the previous iteration. In contrast, a loop over
    time or over chunks of a sequence runs over activations, and the iterations of a
    loop over experts all read the same input.
    """
    first = eqn.params["num_consts"] + eqn.params["num_carry"]
    slices = {a for a in eqn.inputs[first:] if isinstance(a, int)}
    if not any(flow.of_state.get(v) for v in slices):
        return False
    body = eqn.regions[0]
    known = set(body.inputs[eqn.params["num_consts"] : first])
    for inner in body.equations:
        if known.isdisjoint(reads(inner)):
            continue
        parts = (inner, *inner.inner)
        if any(part.primitive in PRODUCTS for part in parts):
            return True
        known.update(inner.outputs)
    return False


def modules_again(analysis: Analysis) -> tuple[str, ...]:
    """Returns the modules with operators that the plan recomputes, in program order.

    The result includes the operators that the step's own ``jax.checkpoint``s recompute.

    Args:
      analysis: the analysis of the planned step.
    """
    if not analysis.remat.layers:
        return ()
    found: dict[str, None] = {}
    for op in analysis.graph.operators:
        path = op.module.split("/")
        if path[-1] == REPEATED:
            found["/".join(path[:-1])] = None
    return tuple(found)
