"""How gradients are summed over devices, and why so."""

from __future__ import annotations

import msgspec


class GradientDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The way in which one gradient is summed over the devices that hold parts of it.

    Attributes:
      name: path of the parameter.
      value: number of the gradient's value in the program.
      shape: of the whole gradient.
      local_shape: of the part of it that one device sends.
      axes: names of the mesh axes over which it is sent.
      workers: number of devices along them.
      scatter: whether each of them needs only its part of the sum.
      within: names of the mesh axes over which it is summed before, as it is; each
        device along them then sends a part.
      keeps: whether the sum stays split over these; it is gathered otherwise.
      codec: how it is sent, as text; '' leaves it to the compiler.
      limit: the codec, as text, that the program is compiled for where parameters of
        ``codec`` are inputs of it; '' where all are constants.
      room: part of the limit's bytes that is sent, for all gradients of the bucket with
        that limit together.
      feedback: whether what was not sent is added to the next step's gradient.
      average_every: steps between averages of the residuals over the devices; 0:
        never.
      bucket: gradients of one bucket are sent together.
      dense_bytes: bytes that one device sends along ``axes`` without a codec.
      wire_bytes: bytes that one device sends along ``axes`` with it.
      within_bytes: bytes that one device sends along ``within``.
      error: expected relative error of what is sent, in the L2 norm.
      saved_s: seconds a step that the codec saves.
    """

    name: str
    value: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: tuple[str, ...]
    workers: int
    scatter: bool = False
    within: tuple[str, ...] = ()
    keeps: bool = False
    codec: str = ""
    limit: str = ""
    room: float = 1.0
    feedback: bool = False
    average_every: int = 0
    bucket: int = 0
    dense_bytes: float = 0.0
    wire_bytes: float = 0.0
    within_bytes: float = 0.0
    error: float = 0.0
    saved_s: float = 0.0


class Compression(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Why gradients are sent as they are.

    Attributes:
      mode: ``none``, ``auto``, or the codec that was asked for.
      error_budget: largest relative error of the whole gradient, in the
        optimizer's metric; None: unlimited.
      metric: how errors of different gradients add up.
      error: the relative error of the choice, in that metric.
      reason: the outcome in words.
    """

    mode: str = "none"
    error_budget: float | None = None
    metric: str = ""
    error: float = 0.0
    reason: str = ""
