"""Codecs of stage cuts: which activations and cotangents stages send encoded.

A *cut* lies between two successive parts of the model. A plan has two codecs for each
cut: one for the activations that leave the part before the cut, and one for the
cotangents that leave the part behind the cut. A value is encoded if all of this holds:

- A task of a microbatch computes the value, and tasks of the microbatch on exactly one
  other stage read it. Values that several other stages read, such as a memory that all
  later layers attend to, are sent exactly, because their error would enter each of
  these stages. A skip connection with one reader is encoded by the codecs of the cut
  at which it leaves its stage.
- The value is a real floating-point array of at least `LEAST` elements that has rows of
  the batch. So integers, keys, masks, scalars, and parameters that several stages read
  are sent exactly.
- No update reads the value, and it is no result of the step. So gradients are not
  encoded; they have codecs of their own (`autopar.planner.stages.codecs`).
- The code has fewer bytes than the value.

A cut may have several codecs for one direction: the first is that of the largest value,
and the last that of all further values.

If both directions of a cut have the same codec ``topk``, a cotangent is sent at the
positions of its activation, without positions. The cotangent of an activation is the
only value of its shape and dtype that is sent back between the same stages; if there
are several, each is sent with its own positions. The receiving stage takes the
positions from the code that it received. The sending stage keeps the code that it sent
until the backward pass: among the inputs of its tasks, the code of value ``v`` is
``~v``.

The receiving stage computes with the decoded activations, in the forward pass and in
the backward pass. The cotangent that it sends back is that of the decoded activation,
and the sending stage takes it for the cotangent of its own exact activation (a
straight-through gradient).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.compression.cut_codes import (
    EXACT,
    CutCode,
    by_size,
    check_array_codecs,
    keeps_some,
)
from autopar.errors import PlanError
from autopar.planner.stages.stage_costs import stage_messages
from autopar.plans import PipelineData
from autopar.steps.stages import CutStep
from autopar_errors import InputError
from autopar_passes.stages.cut import Cut, Phase

# Values with fewer elements are sent exactly: they have few bytes.
LEAST = 1024


def cut_parts(cut: CutStep) -> dict[int, tuple[bool, int]]:
    """The values that may be encoded, without regard to a codec.

    Returns:
      Value -> whether it is an activation (otherwise a cotangent), and the number of
      the cut at which it leaves its stage.
    """
    graph, labels = cut.analysis.graph, cut.analysis.dim_labels
    leaving = {v for v in cut.cut.program.body.outputs if isinstance(v, int)}
    once = leaving | cut.cut.crossings
    stages: dict[int, set[int]] = {}
    found: dict[int, tuple[bool, int]] = {}
    for m in stage_messages(cut):
        stages.setdefault(m.value, set()).add(m.target)
        value = graph.values[m.value]
        if (
            m.maker is None
            or m.late
            or m.maker.phase is Phase.UPDATE
            or m.value in once
            or not jnp.issubdtype(value.dtype, jnp.floating)
            or value.size < LEAST
            or not labels.degree(m.value)
        ):
            continue
        forward = m.maker.phase is Phase.FORWARD
        number = m.maker.number if forward else m.maker.number - 1
        if 0 <= number < cut.cut.parts.count - 1:
            found[m.value] = forward, number
    return {v: place for v, place in found.items() if len(stages[v]) == 1}


def with_codes(
    cut: CutStep, activations: Sequence[str], cotangents: Sequence[str]
) -> CutStep:
    """The step whose stages send each other values by codecs, and by no others.

    Args:
      cut: the step as stages.
      activations: the codec of the activations of each cut, as text; empty: all are
        sent exactly.
      cotangents: likewise of the cotangents.

    Raises:
      PlanError: a text names no codec for cuts, or there is not one codec for each cut.
    """
    count = cut.cut.parts.count - 1
    for name, texts in (("activation", activations), ("cotangent", cotangents)):
        if len(texts) not in (0, count):
            raise PlanError(
                f"{name}_codecs: the pipeline has {count} cuts between its parts, and "
                f"{len(texts)} codecs are given. Give one for each cut; '{EXACT}' "
                "sends values as they are."
            )
        for text in texts:
            check_cut_codec(text, f"{name}_codecs")
    tasks = cut.unmasked or cut.cut
    exact = dataclasses.replace(cut, cut=tasks, codes={}, masks={}, unmasked=None)
    if not {*activations, *cotangents} - {EXACT}:
        return exact
    out: dict[int, CutCode] = {}
    places = cut_parts(exact)
    for value, text in _texts(exact, places, activations, cotangents).items():
        if text == EXACT:
            continue
        known = cut.analysis.graph.values[value]
        code = CutCode(text, tuple(known.shape), jnp.dtype(known.dtype).name)
        if code.nbytes < code.dense_bytes:
            out[value] = code
    masks = _masks(exact, out, places)
    for value in masks:
        out[value] = dataclasses.replace(out[value], masked=True)
    if not masks:
        return dataclasses.replace(exact, codes=out)
    return dataclasses.replace(
        exact, cut=_with_masks(tasks, masks), codes=out, masks=masks, unmasked=tasks
    )


def _texts(
    cut: CutStep,
    places: Mapping[int, tuple[bool, int]],
    activations: Sequence[str],
    cotangents: Sequence[str],
) -> dict[int, str]:
    """Value -> its codec. The largest value of a cut has the first codec there."""
    same: dict[tuple[bool, int], list[int]] = {}
    for value, place in places.items():
        same.setdefault(place, []).append(value)
    out: dict[int, str] = {}
    for (forward, number), values in same.items():
        texts = activations if forward else cotangents
        if not texts:
            continue
        sizes = {v: cut.analysis.graph.values[v].nbytes for v in values}
        out |= by_size(texts[number], sizes)
    return {v: out[v] for v in places if v in out}


def _masks(
    cut: CutStep,
    codes: Mapping[int, CutCode],
    places: Mapping[int, tuple[bool, int]],
) -> dict[int, int]:
    """Cotangent -> the activation at whose positions it is sent."""
    found: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
    for m in stage_messages(cut):
        code = codes.get(m.value)
        if code is None or not keeps_some(code.codec):
            continue
        forward, number = places[m.value]
        stages = (m.source, m.target) if forward else (m.target, m.source)
        pair = found.setdefault((code, number, *stages), ([], []))
        pair[0 if forward else 1].append(m.value)
    return {
        backward[0]: forward[0]
        for forward, backward in found.values()
        if len(forward) == len(backward) == 1
    }


def _with_masks(cut: Cut, masks: Mapping[int, int]) -> Cut:
    """The tasks with the codes that they need as masks among their inputs."""
    makers = {v: key for key, task in cut.tasks.items() for v in task.outputs}
    tasks = dict(cut.tasks)
    for key, task in cut.tasks.items():
        inputs = dict(task.inputs)
        for cotangent, activation in masks.items():
            maker = inputs.get(cotangent)
            if cotangent in task.outputs:
                inputs.setdefault(activation, makers[activation])
            elif maker is not None and maker.stage != key.stage:
                inputs[~activation] = makers[activation]
        tasks[key] = dataclasses.replace(task, inputs=tuple(inputs.items()))
    return dataclasses.replace(cut, tasks=tasks)


def with_planned_codes(cut: CutStep, data: PipelineData) -> CutStep:
    """The step with the codecs of a plan; see `with_codes`."""
    return with_codes(cut, data.activation_codecs, data.cotangent_codecs)


def check_cut_codec(text: str, what: str) -> None:
    """Checks that a text names a codec for stage cuts.

    Raises:
      PlanError: it does not.
    """
    try:
        check_array_codecs(text)
    except InputError as error:
        raise PlanError(f"{what}: {error}") from error
