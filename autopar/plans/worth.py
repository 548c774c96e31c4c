"""What a plan makes of its cluster, as data."""

from __future__ import annotations

import math

import msgspec

# An axis over which less than this part of the work is split is as good as unused.
LEAST_SPLIT = 1e-6


class AxisUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan makes of one mesh axis.

    Attributes:
      name: of the axis.
      size: number of devices along it.
      repeated: part of the seconds of work that all devices along it do alike, 0 to 1.
      holds: whether parts of an input lie on different devices along it.
    """

    name: str
    size: int
    repeated: float
    holds: bool

    @property
    def unused(self) -> bool:
        """Whether no operator's work is split over it."""
        return self.size > 1 and self.repeated > 1.0 - LEAST_SPLIT

    @property
    def shortens(self) -> float:
        """The part by which the axis shortens the work of a step, 0 to 1.

        >>> AxisUse(name="data", size=8, repeated=0.0, holds=True).shortens
        0.875
        """
        without = self.repeated + self.size * (1.0 - self.repeated)
        return 1.0 - 1.0 / without


class Worth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan makes of its cluster, as the cost model predicts it.

    Attributes:
      one_device_s: seconds of the whole step on one device of the kind.
      one_device_bytes: most bytes live at once there.
      one_device_fits: whether a device has so much memory.
      speed_up: ``one_device_s`` over the seconds of a step of the plan.
      model_flops: floating point operations of the step's matrix products and attention
        on the whole batch. What is computed again counts once, and attention in full,
        whatever its mask.
      mfu: model FLOPs utilisation: the time of these at the devices' peak, over the
        time of the step.
      causal_mfu: the same where attention with a causal mask counts half.
      fused_saves_s: seconds of a step that a fused kernel of attention would save where
        the step writes its attention out.
      rows: rows of the batch in a step; 0 where there is no batch.
      tokens: tokens of the batch in a step; 0 where the batch holds none.
      rows_per_s: rows a second.
      tokens_per_s: tokens a second.
      axes: the use of each mesh axis.
      scheme: the known scheme that the layouts resemble, over which axes.
    """

    one_device_s: float
    one_device_bytes: float
    one_device_fits: bool
    speed_up: float
    model_flops: float
    mfu: float
    rows: int
    tokens: int
    rows_per_s: float
    tokens_per_s: float
    axes: tuple[AxisUse, ...]
    scheme: str
    causal_mfu: float = 0.0
    fused_saves_s: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def efficiency(self) -> float:
        """The speed-up over the number of devices."""
        return self.speed_up / self.devices

    @property
    def unused(self) -> tuple[AxisUse, ...]:
        """The axes over which no operator's work is split."""
        return tuple(axis for axis in self.axes if axis.unused)

    @property
    def needed_devices(self) -> int:
        """Number of devices on which the step would be as fast.

        Axes that split nothing are left out. One that splits what is held, and no
        work, is not: without it the plan may not fit.
        """
        idle = (axis.size for axis in self.unused if not axis.holds)
        return self.devices // math.prod(idle)

    def faster(self, factor: float) -> Worth:
        """The same where a step takes a part of the time, ``1 / factor``."""
        return msgspec.structs.replace(
            self,
            speed_up=self.speed_up * factor,
            mfu=self.mfu * factor,
            causal_mfu=self.causal_mfu * factor,
            rows_per_s=self.rows_per_s * factor,
            tokens_per_s=self.tokens_per_s * factor,
        )
