"""What the backward pass of a plan computes again instead of keeping it."""

from __future__ import annotations

import msgspec


class Rematerialisation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What the backward pass of a plan of one stage computes again.

    Layers have numbers from 0, in the order of the forward pass. The default is what
    the step itself says by ``jax.checkpoint``.

    Attributes:
      layers: those whose activations are computed again.
      starts: the forward equation of one microbatch's program at which each layer
        begins, by its number; empty where no layer is computed again. The iterations of
        a loop over layers all begin at the loop.
      level: what is kept of such a layer: nothing (``full``), its matrix products and
        convolutions (``dots``), or the values that the step names so (``names=a,b``).
      checkpoints: whether the step's own ``jax.checkpoint``s hold.
    """

    layers: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    level: str = "full"
    checkpoints: bool = True


# What the step itself says.
AS_WRITTEN = Rematerialisation()
