"""The messages that a plan's codecs send, and what other codecs would cost.

Gradients of a bucket travel together: what they ask for in the same round is one
collective (`autopar.compression.exchange`) and takes the time of all their bytes, as
when the codecs were chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message, messages, wire_bytes
from autopar.cost.codecs.messages import TELEMETRY_BYTES
from autopar.cost.codecs.terms import (
    added_s,
    effective_error,
    local_s,
    plain_s,
    relative_error,
    wire_s,
)
from autopar.cost.collectives import collective_bytes, collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.summation import around
from autopar.planner.codecs.choose import CANDIDATES
from autopar.plans import GradientDecision, Plan
from autopar.reports.table import CollectiveRow

_PHASE = "update"


@dataclasses.dataclass(frozen=True, slots=True)
class CodecOption:
    """What one way to send a gradient costs by itself.

    Attributes:
      codec: as text; '' is what the compiler does.
      wire_bytes: bytes that one device sends in a step.
      wire_s: seconds that these add to the messages of the step.
      local_s: seconds of encoding and decoding in a step.
      error: expected relative error of what is sent, in the L2 norm.
      counted_error: what of it counts against the budget.
      refused: why it cannot be used, or ''.
    """

    codec: str
    wire_bytes: float
    wire_s: float
    local_s: float
    error: float
    counted_error: float
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Seconds in a step; infinite where it cannot be used."""
        return math.inf if self.refused else self.wire_s + self.local_s


def codec_rows(plan: Plan, pricer: Pricer) -> tuple[CollectiveRow, ...]:
    """What is sent for gradients with codecs, and their work on each device.

    The averages of residuals stand among it as if they were due in every step, as
    all branches of a condition are counted. What steps send that fall back to other
    codecs (`autopar.compression.fallback`) does not.
    """
    coded = [g for g in plan.gradients if g.codec]
    if not coded:
        return ()
    sent: dict[
        tuple[tuple[str, ...], *tuple[object, ...]],
        list[tuple[GradientDecision, Message]],
    ]
    sent = defaultdict(list)
    for gradient in coded:
        for number, message in enumerate(_messages(gradient)):
            key = (gradient.axes, *_bucket(gradient), number, message.kind)
            sent[key].append((gradient, message))
    for gradient in coded:
        for message in _within(gradient, pricer):
            key = (gradient.within, *_bucket(gradient), "within", message.kind)
            sent[key].append((gradient, message))
    rows = [_message_row(pricer, key[0], members) for key, members in sent.items()]
    rows.append(_work_row(pricer, coded))
    return (*rows, _telemetry_row(pricer, coded))


def _messages(gradient: GradientDecision) -> tuple[Message, ...]:
    found = messages(
        parse_codec(gradient.codec),
        gradient.local_shape,
        gradient.workers,
        scatter=gradient.scatter,
    )
    if not gradient.average_every:
        return found
    nbytes = 4.0 * math.prod(gradient.local_shape)
    sent = collective_bytes("all_reduce", nbytes, gradient.workers)
    return (*found, Message("all_reduce", nbytes, sent))


def _message_row(
    pricer: Pricer,
    names: tuple[str, ...],
    members: Sequence[tuple[GradientDecision, Message]],
) -> CollectiveRow:
    """One collective over mesh axes: a round of all gradients of a bucket."""
    message = members[0][1]
    axes = _axes(pricer, names)
    whole = sum(m.nbytes for _, m in members)
    return CollectiveRow(
        kind=message.kind,
        axes=names,
        arrays=tuple(gradient.name for gradient, _ in members),
        phase=_PHASE,
        trips=1.0,
        sent_bytes=sum(m.sent for _, m in members),
        seconds=pricer.skew * collective_s(message.kind, whole, axes),
    )


def _bucket(gradient: GradientDecision) -> tuple[object, ...]:
    """What gradients that are sent together have in common."""
    return (gradient.bucket, gradient.axes, gradient.within)


def _within(gradient: GradientDecision, pricer: Pricer) -> tuple[Message, ...]:
    """The sum over fast links before, and the gather of the sum after."""
    if not gradient.within:
        return ()
    devices = math.prod(axis.size for axis in _axes(pricer, gradient.within))
    elements = math.prod(gradient.local_shape) * devices
    return tuple(
        Message(kind, nbytes, collective_bytes(kind, nbytes, devices))
        for kind, nbytes in around(elements, keeps=gradient.keeps)
    )


def _work_row(pricer: Pricer, coded: Sequence[GradientDecision]) -> CollectiveRow:
    """Encoding and decoding, which sends nothing."""
    device = pricer.cluster.device
    seconds = sum(
        local_s(parse_codec(g.codec), math.prod(g.local_shape), device) for g in coded
    )
    names = tuple(g.name for g in coded)
    return CollectiveRow(
        kind="encode",
        axes=(),
        arrays=names,
        phase=_PHASE,
        trips=len(coded),
        sent_bytes=0.0,
        seconds=seconds,
    )


def _telemetry_row(pricer: Pricer, coded: Sequence[GradientDecision]) -> CollectiveRow:
    """The sums of norms and errors over all devices, small but there."""
    axes, count = pricer.mesh.axes, len(coded)
    devices = math.prod(axis.size for axis in axes)
    nbytes = TELEMETRY_BYTES * count
    return CollectiveRow(
        kind="all_reduce",
        axes=tuple(axis.name for axis in axes),
        arrays=("telemetry",),
        phase=_PHASE,
        trips=count,
        sent_bytes=collective_bytes("all_reduce", nbytes, devices),
        seconds=pricer.skew * collective_s("all_reduce", nbytes, axes),
    )


def codec_options(
    gradient: GradientDecision, itemsize: int, pricer: Pricer
) -> list[CodecOption]:
    """What the codecs that ``auto`` knows would cost a gradient, the fastest first.

    The codec that the plan has is among them, and '' is what the compiler does.

    Args:
      gradient: how the plan sends it.
      itemsize: bytes of one of its elements in the program.
      pricer: the plan's mesh and cluster.
    """
    texts = dict.fromkeys([gradient.codec, *CANDIDATES])
    options = [
        _coded(gradient, parse_codec(text), text, pricer)
        if text
        else _plain(gradient, itemsize, pricer)
        for text in texts
    ]
    return sorted(options, key=lambda option: option.seconds)


def _plain(gradient: GradientDecision, itemsize: int, pricer: Pricer) -> CodecOption:
    fast = _axes(pricer, gradient.within)
    devices = math.prod(axis.size for axis in fast)
    wire = pricer.skew * plain_s(
        float(math.prod(gradient.local_shape) * devices * itemsize),
        _axes(pricer, gradient.axes),
        fast,
        pricer.runs_as,
        scatter=gradient.scatter,
        keeps=gradient.keeps,
    )
    return CodecOption("", gradient.dense_bytes, wire, 0.0, 0.0, 0.0)


def _coded(
    gradient: GradientDecision, codec: Codec, text: str, pricer: Pricer
) -> CodecOption:
    shape, workers, scatter = gradient.local_shape, gradient.workers, gradient.scatter
    error = relative_error(codec, shape)
    counted = effective_error(error, feedback=codec.feedback)
    refused = codec.check(shape, scatter=scatter)
    if refused:
        return CodecOption(text, 0.0, 0.0, 0.0, error, counted, refused)
    axes = _axes(pricer, gradient.axes)
    wire = wire_s(codec, shape, workers, axes, scatter=scatter)
    fast = _axes(pricer, gradient.within)
    wire += sum(added_s(m.kind, m.nbytes, fast) for m in _within(gradient, pricer))
    local = local_s(codec, math.prod(shape), pricer.cluster.device)
    nbytes = wire_bytes(codec, shape, workers, scatter=scatter)
    return CodecOption(text, nbytes, pricer.skew * wire, local, error, counted)


def _axes(pricer: Pricer, names: Sequence[str]) -> tuple[MeshAxis, ...]:
    return tuple(axis for axis in pricer.mesh.axes if axis.name in names)
