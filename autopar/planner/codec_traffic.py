"""The messages that a plan's codecs send, and what other codecs would cost.

Gradients of a bucket travel together: what they ask for in the same round is one
collective (`autopar.compression.exchange`). Each is charged what its bytes add to a
message, and the message's latency once, as when the codecs were chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codec import Codec
from autopar.compression.exchange import Message, messages, wire_bytes
from autopar.compression.registry import parse_codec
from autopar.compression.synchronise import NON_FINITE
from autopar.cost.collectives import collective_bytes, collective_s
from autopar.cost.compression import (
    added_s,
    effective_error,
    local_s,
    relative_error,
    round_s,
    wire_s,
)
from autopar.planner.compression import CANDIDATES
from autopar.planner.price import CPU_SKEW, Pricer
from autopar.plans import GradientDecision, Plan
from autopar.plans.table import CollectiveRow

# Of each gradient the devices add up so many float32 sums.
TELEMETRY_BYTES = 4 * (NON_FINITE + 1)
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
    all branches of a condition are counted.
    """
    coded = [g for g in plan.gradients if g.codec]
    if not coded:
        return ()
    sent: dict[tuple[object, ...], list[tuple[GradientDecision, Message]]]
    sent = defaultdict(list)
    for gradient in coded:
        for number, message in enumerate(_messages(gradient)):
            key = (gradient.bucket, gradient.axes, number, message.kind)
            sent[key].append((gradient, message))
    rows = [_message_row(pricer, members) for members in sent.values()]
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
    pricer: Pricer, members: Sequence[tuple[GradientDecision, Message]]
) -> CollectiveRow:
    """One collective: a round of all gradients of a bucket."""
    first, message = members[0]
    axes = _axes(pricer, first.axes)
    added = sum(added_s(m.kind, m.nbytes, axes) for _, m in members)
    return CollectiveRow(
        kind=message.kind,
        axes=first.axes,
        arrays=tuple(gradient.name for gradient, _ in members),
        phase=_PHASE,
        trips=1.0,
        sent_bytes=sum(m.sent for _, m in members),
        seconds=_skew(pricer) * added + round_s(message.kind, axes),
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
        seconds=_skew(pricer) * collective_s("all_reduce", nbytes, axes),
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
    kind = pricer.runs_as("reduce_scatter" if gradient.scatter else "all_reduce")
    nbytes = float(math.prod(gradient.local_shape) * itemsize)
    wire = _skew(pricer) * added_s(kind, nbytes, _axes(pricer, gradient.axes))
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
    wire = _skew(pricer) * wire_s(codec, shape, workers, axes, scatter=scatter)
    local = local_s(codec, math.prod(shape), pricer.cluster.device)
    nbytes = wire_bytes(codec, shape, workers, scatter=scatter)
    return CodecOption(text, nbytes, wire, local, error, counted)


def _axes(pricer: Pricer, names: Sequence[str]) -> tuple[MeshAxis, ...]:
    return tuple(axis for axis in pricer.mesh.axes if axis.name in names)


def _skew(pricer: Pricer) -> float:
    return CPU_SKEW if pricer.cluster.device.kind == "cpu" else 1.0
