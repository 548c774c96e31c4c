"""The pipeline of a plan: where its parts are cut, and what each task is to take."""

from __future__ import annotations

import msgspec


class PipelineData(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a step is cut into the stages of a plan.

    Part ``k`` of the model is on stage ``k % stages``; with as many parts as stages
    each stage has one. Seconds are those of one microbatch, but for ``step_s``.

    Attributes:
      layers: the forward equation of one microbatch's program at which each layer
        begins, by its number.
      parts: the layer at which each part begins.
      homes: pytree path of each input of the step -> the stage that has it between
        steps.
      pieces: pytree path of an array of stacked layers -> how many of them each of its
        pieces has. Pieces are inputs with paths of their own, such as ``kernel@0:2``.
      recomputed: the layers whose activations the backward pass computes again.
      forward_s: seconds of each part's forward pass.
      backward_s: seconds of each part's backward pass, or of its gradients of inputs
        where those of weights are tasks of their own.
      weight_s: seconds of each part's gradients of weights where they are.
      forward_link_s: for how long activations occupy the link from each part but the
        last to the next.
      backward_link_s: the same for cotangents, from the next part.
      latency_s: the latency between each part but the last and the next.
      step_s: seconds of what each stage does once a step.
      memory_bytes: the most that a device of each stage holds at once.
      activation_bytes: what a device of each part keeps of one microbatch from its
        forward to its backward pass.
    """

    layers: tuple[int, ...]
    parts: tuple[int, ...]
    homes: dict[str, int] = {}
    pieces: dict[str, tuple[int, ...]] = {}
    recomputed: tuple[int, ...] = ()
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    forward_link_s: tuple[float, ...] = ()
    backward_link_s: tuple[float, ...] = ()
    latency_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
