"""Constants of a kind of machine that no datasheet gives.

They correct the formulas of `autopar.cost` for what compilers and shared machines
really do. A device takes those of its kind (`CALIBRATIONS`) unless its cluster file
has a table ``[device.calibration]``.
"""

import dataclasses
import math

from autopar.cluster.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Corrections of the cost model for one kind of device.

    Attributes:
      skew: factor on the time of every collective: devices that reach it early wait
        for the others. 1 between devices that run alone.
      half_rate_side: elements; a matrix product with one side of this length runs at
        half its rate, because the rest of a tile or a vector is wasted.
      vector_slowdown: factor on the roofline time of operators that are no matrix
        products.
      patch_passes: passes over memory for the unfolded patches of a convolution; 0
        where convolutions do not unfold them.
      memory_overhead: factor on the peak of live buffers, for copies into other
        memory orders and for fragmentation.
      combined_kinds: kinds of collectives that the compiler joins into one message.
      combined_bytes: most bytes of the results of one message; a larger array
        travels alone. 1e18 is no limit.
      combined_arrays: most arrays in one message.
      arrays_apart: whether the arrays of a message between hosts are sent one after
        the other, so that each waits for the latency of the link.
      forms_reduce_scatter: whether the compiler forms reduce-scatters; without, an
        all-reduce runs of which each device keeps a slice.
      copies_pieces: whether what a collective leaves in pieces is copied into its
        place, or what it sends is packed.
      reassociates: whether the compiler takes the sum of two sums over devices as one.
      overlap: part of the work beside which communication may run; 0 where a device
        does one after the other.
      contention: seconds of work lost for each second of communication beside it.
      whole_messages: whether communication runs beside work as whole messages, sums
        beside the update too (`autopar.cost.parts`); else array by array.
    """

    skew: float = 1.0
    half_rate_side: float = 0.0
    vector_slowdown: float = 1.0
    patch_passes: float = 0.0
    memory_overhead: float = 1.2
    combined_kinds: tuple[str, ...] = ()
    combined_bytes: float = 1e18
    combined_arrays: int = 256
    arrays_apart: bool = False
    forms_reduce_scatter: bool = True
    copies_pieces: bool = True
    reassociates: bool = False
    overlap: float = 0.0
    contention: float = 0.0
    whole_messages: bool = False

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("skew", "vector_slowdown", "memory_overhead"):
            value = getattr(self, name)
            if not (value >= 1 and math.isfinite(value)):
                raise ClusterError(
                    f"Calibration: {name} must be a finite number of at least 1, got "
                    f"{value!r}."
                )
        for name in ("half_rate_side", "patch_passes", "combined_bytes"):
            value = getattr(self, name)
            if not value >= 0:
                raise ClusterError(
                    f"Calibration: {name} must be zero or positive, got {value!r}."
                )
        for name in ("overlap", "contention"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ClusterError(
                    f"Calibration: {name} must lie between 0 and 1, got {value!r}."
                )
        if self.combined_arrays < 1:
            raise ClusterError(
                "Calibration: combined_arrays must be 1 or more, got "
                f"{self.combined_arrays!r}."
            )


# 30 MiB + 7 bytes are the thresholds xla_gpu_{all_reduce,all_gather,reduce_scatter}_
# combine_threshold_bytes (openxla/xla, xla/service/collective_utils.h), 256 arrays the
# limit in xla/service/gpu/gpu_compiler.cc. The TPU's compiler is closed; the same is
# assumed for it. On CPUs (jaxlib 0.10.2) 3.2 GB of gradients in 25 arrays became one
# all-reduce and 401 arrays two, of 256 and 145, while no all-gathers were joined:
# benchmarks/combined_collectives.py.
_COMBINED_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_COMBINED_BYTES = 30.0 * 1024 * 1024 + 7

CALIBRATIONS = {
    "cpu": Calibration(
        # Simulated devices share the cores. Chosen by hand, below the 1.9 of least
        # squares over measured steps (docs/cost-model.md).
        skew=1.5,
        # The width of a vector register of 32-bit numbers (AVX2); not fitted.
        half_rate_side=8.0,
        # XLA's CPU code for element-wise operators and reductions takes longer than
        # one pass over memory. Chosen by hand: least squares over measured steps gave
        # about 3, but then the fastest plans of some examples were predicted worse.
        vector_slowdown=2.0,
        # Convolutions are products over unfolded patches (Eigen), which are written
        # and read once, mostly in cache: half a pass over memory each way. Assumed.
        patch_passes=0.5,
        # What the heap loses between buffers, and copies that no rule is known for:
        # the peak of the buffers is up to 8 % below XLA's in programs of the examples.
        memory_overhead=1.05,
        combined_kinds=("all_reduce",),
        # XLA hands gloo the arrays one by one: 70 arrays of 4 KiB take 36 to 186 ms
        # between two hosts at 1 Gbit/s, and 294 to 371 ms among four; one of 280 KiB
        # takes 2 and 6 (benchmarks/network/collectives.py --arrays 70).
        arrays_apart=True,
        # XLA's CPU pipeline has no pass that forms a reduce-scatter.
        forms_reduce_scatter=False,
    ),
    # Half-rate sides: a quarter of the tiles that GPU libraries prefer (64), and of a
    # TPU's matrix unit (128). Assumptions, not fitted. On GPUs the peak of the buffers
    # is about what XLA allocates (docs/record, compilers of accelerators); the
    # TPU's memory overhead is the one chosen on CPUs.
    "gpu": Calibration(
        half_rate_side=16.0,
        memory_overhead=1.0,
        combined_kinds=_COMBINED_KINDS,
        combined_bytes=_COMBINED_BYTES,
        # The dimension that a collective gathers, scatters or splits is outermost in
        # memory, so that pieces lie in their places
        # (xla/service/gpu/transforms/layout_assignment.cc); products read any order.
        copies_pieces=False,
        # Both kinds of sums (autopar_passes.sums.reassociated).
        reassociates=True,
        overlap=1.0,
        # Collectives take streaming multiprocessors and bandwidth from the work beside
        # them: work is 18.9 % slower on average meanwhile (arXiv 2507.03114).
        contention=0.189,
        # Read from schedules for H100 (docs/record). TPUs send more and smaller
        # messages than the limits above make, and no rule for them is known.
        whole_messages=True,
    ),
    "tpu": Calibration(
        half_rate_side=32.0,
        combined_kinds=_COMBINED_KINDS,
        combined_bytes=_COMBINED_BYTES,
        # Tensor-parallel plans for 16 v5e send what is predicted so, byte for byte of
        # reduce-scatters, sums apart 1.2 to 1.6 times that (libtpu 0.0.42).
        reassociates=True,
        # Transfers between TPUs are made by engines of their own; no figure of what
        # they cost the work beside them was found.
        overlap=1.0,
    ),
}
