"""The messages that a plan's codecs send, and the costs of other codecs.

Messages that travel together are one collective (`autopar.layouts.summation`). The
collective takes the time of their total bytes, as in the planner's choice of codecs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.compression.codecs.registry import offered_codecs, parse_codec
from autopar.compression.exchange import Message
from autopar.cost.codecs import (
    SQUARES_BYTES,
    TELEMETRY_BYTES,
    CodecPrice,
    GradientRoute,
    codec_price,
    compiler_price,
    local_s,
    planned_route,
    squares_of,
    with_wire_bytes,
)
from autopar.cost.collectives import collective_bytes, collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.summation import WITHIN, Bucket, BucketCollective, bucket_messages
from autopar.planner.codecs.adjusted import codec_of
from autopar.planner.option_texts import TELEMETRY_EVERY
from autopar.plans import GradientDecision
from autopar.reports.table import CollectiveRow

_PHASE, _TELEMETRY = "update", "telemetry"


def codec_rows(
    gradients: Sequence[GradientDecision], pricer: Pricer
) -> tuple[CollectiveRow, ...]:
    """The collectives of gradients with codecs, and the work of codecs on each device.

    Some codecs average their residuals only in some steps. The messages that average
    residuals are counted in every step, because the planner counts all branches of a
    conditional. Messages of fallback codecs (`autopar.compression.synchronise`) are not
    counted.
    """
    coded = [g for g in gradients if g.codec]
    if not coded:
        return ()
    mesh = pricer.mesh.axes
    routes = [planned_route(gradient, mesh) for gradient in coded]
    buckets = [Bucket(g.bucket, g.axes, g.within) for g in coded]
    sent: dict[BucketCollective[str], list[tuple[str, Message]]]
    sent = defaultdict(list)
    for gradient, bucket, route in zip(coded, buckets, routes, strict=True):
        rounds = _rounds(gradient, route)
        for key, message in bucket_messages(bucket, rounds, route.within_messages):
            sent[key].append((gradient.name, message))
    scattered = [g.scatter for g in coded]
    squares = squares_of(
        zip(buckets, scattered, strict=True), [axis.name for axis in mesh]
    )
    for bucket, route in zip(buckets, routes, strict=True):
        if bucket in squares:
            nbytes = collective_bytes("all_reduce", SQUARES_BYTES, route.workers)
            message = Message("all_reduce", SQUARES_BYTES, nbytes)
            sent[squares[bucket]].append((_TELEMETRY, message))
    ordered = sorted(sent.items(), key=lambda item: item[0].round == WITHIN)
    rows = [_message_row(pricer, key, members) for key, members in ordered]
    rows.append(_work_row(pricer, coded))
    often = [k for k, bucket in enumerate(buckets) if bucket not in squares]
    return (*rows, _telemetry_row(pricer, len(coded), len(often)))


def _rounds(gradient: GradientDecision, route: GradientRoute) -> tuple[Message, ...]:
    """The codec's messages, and the message that averages residuals, if any."""
    found = route.rounds(codec_of(gradient))
    if not gradient.average_every:
        return found
    nbytes = 4.0 * route.elements
    sent = collective_bytes("all_reduce", nbytes, route.workers)
    return (*found, Message("all_reduce", nbytes, sent))


def _message_row(
    pricer: Pricer,
    shared: BucketCollective[str],
    members: Sequence[tuple[str, Message]],
) -> CollectiveRow:
    """The row of one collective, which carries the messages of all its gradients."""
    axes = tuple(axis for axis in pricer.mesh.axes if axis.name in shared.axes)
    whole = sum(m.nbytes for _, m in members)
    return CollectiveRow(
        kind=shared.kind,
        axes=shared.axes,
        arrays=tuple(dict.fromkeys(name for name, _ in members)),
        phase=_PHASE,
        trips=1.0,
        sent_bytes=sum(m.sent for _, m in members),
        seconds=pricer.skew(axes) * collective_s(shared.kind, whole, axes),
    )


def _work_row(pricer: Pricer, coded: Sequence[GradientDecision]) -> CollectiveRow:
    """The row of encoding and decoding, which send nothing."""
    device = pricer.cluster.device
    seconds = sum(local_s(parse_codec(g.codec), g.local_shape, device) for g in coded)
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


def _telemetry_row(pricer: Pricer, count: int, often: int) -> CollectiveRow:
    """The row of the sums of norms and errors over all devices, which are small.

    Only some steps measure telemetry. The bytes are those of such a step. The seconds
    are a mean over all steps.

    Args:
      pricer: the mesh and cluster.
      count: number of gradients with codecs.
      often: number of gradients whose norms or errors are summed in every step.
    """
    axes = pricer.mesh.axes
    devices = math.prod(axis.size for axis in axes)
    seldom_s, often_s = (
        collective_s("all_reduce", TELEMETRY_BYTES * k, axes) if k else 0.0
        for k in (count - often, often)
    )
    return CollectiveRow(
        kind="all_reduce",
        axes=tuple(axis.name for axis in axes),
        arrays=(_TELEMETRY,),
        phase=_PHASE,
        trips=count,
        sent_bytes=collective_bytes("all_reduce", TELEMETRY_BYTES * count, devices),
        seconds=pricer.skew(axes) * (often_s + seldom_s / TELEMETRY_EVERY),
    )


def codec_options(gradient: GradientDecision, pricer: Pricer) -> list[CodecPrice]:
    """The costs of a gradient with each codec that ``auto`` may choose, fastest first.

    The list includes the plan's codec, and '' for the compiler's sum without a codec.

    Args:
      gradient: the plan's decision on the gradient.
      pricer: the plan's mesh and cluster.
    """
    route = planned_route(gradient, pricer.mesh.axes)
    one = collective_bytes(route.kind, route.elements, route.workers)
    plain = compiler_price(pricer, route, gradient.dense_bytes / one)
    priced = {"": dataclasses.replace(plain, wire_bytes=gradient.dense_bytes)}
    texts = list(dict.fromkeys([gradient.codec, "", *offered_codecs()]))
    for text in filter(None, texts):
        priced[text] = with_wire_bytes(codec_price(pricer, route, text), route)
    if gradient.limit:
        chosen = priced[gradient.codec]
        priced[gradient.codec] = dataclasses.replace(
            chosen, wire_bytes=gradient.wire_bytes
        )
    return sorted((priced[text] for text in texts), key=lambda price: price.seconds)
