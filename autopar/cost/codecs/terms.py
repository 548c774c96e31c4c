"""Time and error of sending a gradient by a codec.

Wire time is that of the collectives that the codec asks for
(`autopar.compression.exchange.codec_messages`), by the collectives' own model. Local
time, encoding and decoding, is what a profile of the device measured. Without one it is
in *passes*: a pass reads and writes each float32 element once, at the device's memory
bandwidth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.cluster import DeviceSpec
from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import example_messages
from autopar.cost.collectives import collective_s

# Messages of many gradients travel together: a codec is charged what its bytes add
# to a message of this size, and the message's latency is charged once.
BUCKET_BYTES = 4e6

# Passes of what one of four workers does for a gradient, feedback and what the step
# reports included; medians of benchmarks/codec_cost.py on 1e6 elements, one CPU core.
_PASSES: dict[str, Callable[[Any], float]] = {
    "dense": lambda codec: 1.7,
    "bf16": lambda codec: 7.0,
    "fp8": lambda codec: 15.0,
    "int8": lambda codec: 7.0,
    # Short blocks leave shorter loops.
    "int4": lambda codec: 14.0 if codec.hadamard else 7.5 if codec.block > 64 else 10.5,
    "sign": lambda codec: 7.5,
    "topk": lambda codec: 20.6,
    "randk": lambda codec: 6.7,
    "blocktopk": lambda codec: 8.6,
    "threshold": lambda codec: 8.6,
    # Three products with the thin factor, and its orthogonal basis.
    "powersgd": lambda codec: 5.8 + 0.33 * codec.rank,
    "sketch": lambda codec: 10.6 * codec.rows,
    "predicted": lambda codec: 8.5,
}
# A codec that nobody has measured is taken for a slow one.
UNKNOWN_PASSES = 60.0
# On accelerators the same element-wise work is fused into few kernels; a pass there
# is a pass over memory, and an encoding has about this part of the CPU's passes.
# An assumption: it was not measured.
ACCELERATOR_PASSES = 0.25


def local_s(codec: Codec, elements: float, device: DeviceSpec) -> float:
    """Seconds of encoding and decoding on one device.

    Args:
      codec: the codec.
      elements: of the gradient on one device.
      device: the device.
    """
    measured = _measured_s(codec, device.codec_s_per_element)
    if measured is not None:
        return measured * elements
    passes = _passes(codec)
    if device.kind != "cpu":
        passes *= ACCELERATOR_PASSES
    return passes * 8.0 * elements / device.memory_bandwidth_bytes_per_s


def _passes(codec: Codec) -> float:
    known = _PASSES.get(codec.name)
    return UNKNOWN_PASSES if known is None else known(codec)


# Codecs and devices of a plan: some tens.
@functools.lru_cache(maxsize=1 << 8)
def _measured_s(codec: Codec, measured: tuple[tuple[str, float], ...]) -> float | None:
    """Seconds for an element by a profile; None where it holds no codec of the name.

    Of the same codec with other parameters, that whose passes are nearest is taken, in
    proportion to the passes.
    """
    own = _passes(codec)
    found = [(parse_codec(text), seconds) for text, seconds in measured]
    alike = [(c, seconds) for c, seconds in found if c.name == codec.name]
    if not alike:
        return None
    if codec in (c for c, _ in alike):
        return dict(alike)[codec]
    near, seconds = min(alike, key=lambda pair: abs(math.log(_passes(pair[0]) / own)))
    return seconds * own / _passes(near)


def wire_s(
    codec: Codec,
    shape: tuple[int, ...],
    workers: int,
    axes: Sequence[MeshAxis],
    *,
    scatter: bool,
) -> float:
    """Seconds that a gradient adds to the messages of its bucket, nearly.

    What the codec sends of every shape is estimated from one: a planner asks for
    thousands.

    Args:
      codec: the codec.
      shape: of the gradient on one device.
      workers: number of devices it is summed over.
      axes: the mesh axes of those.
      scatter: whether each needs only its part of the sum.
    """
    return codec.extent(shape) * _rate_s(codec, workers, tuple(axes), scatter)


@functools.lru_cache(maxsize=1 << 14)
def _rate_s(
    codec: Codec, workers: int, axes: tuple[MeshAxis, ...], scatter: bool
) -> float:
    """Seconds that a gradient adds for one unit of `Codec.extent`."""
    found, extent = example_messages(codec, workers, scatter=scatter)
    return sum(added_s(m.kind, m.nbytes, axes) for m in found) / extent


@functools.lru_cache(maxsize=1 << 14)
def added_s(kind: str, nbytes: float, axes: tuple[MeshAxis, ...]) -> float:
    """Seconds that bytes add to a collective of `BUCKET_BYTES`."""
    whole = collective_s(kind, BUCKET_BYTES + nbytes, axes)
    return whole - collective_s(kind, BUCKET_BYTES, axes)


def expected_error(codec: Codec, shape: tuple[int, ...]) -> float:
    """Expected relative error of one worker's gradient, in the L2 norm.

    For quantisers that of heavy-tailed samples (Student's t with four degrees of
    freedom), and so for sparse codecs; for low rank that of gradients of a small
    character language model. A codec that is not known is taken for the worst.

    Args:
      codec: the codec.
      shape: of the gradient on one device.
    """
    if codec.name == "int4":
        return _int4_error(codec)
    if codec.name in _ERRORS:
        return _ERRORS[codec.name]
    kept = getattr(codec, "ratio", 1 / 100)
    if codec.name in ("topk", "threshold", "blocktopk"):
        # The largest of each block are not the largest of all.
        worse = 1.1 if codec.name == "blocktopk" else 1.0
        return min(0.99, worse * math.sqrt(1 - _top_energy(kept)))
    if codec.name == "predicted":
        return math.sqrt(1 - 0.93 * _top_energy(kept))
    if codec.name == "powersgd":
        part = getattr(codec, "rank", 1) / max(1, _narrow(shape))
        return math.sqrt(1 - _low_rank_energy(part))
    if codec.name == "randk":
        return math.sqrt(1 - kept)
    return 1.0


def _int4_error(codec: Any) -> float:
    """Without rotation it grows with the blocks, whose largest elements do."""
    if codec.hadamard:
        return 0.125
    blocks, errors = zip(*_INT4_ERRORS, strict=True)
    return float(np.interp(math.log2(codec.block), np.log2(blocks), errors))


# Elements of a block, and the error of 2e6 samples of Student's t.
_INT4_ERRORS = (
    (16, 0.106), (32, 0.131), (64, 0.160), (128, 0.193), (256, 0.230), (512, 0.272),
)  # fmt: skip
_ERRORS = {
    "dense": 0.0,
    "bf16": 0.0017,
    "int8": 0.0134,
    "fp8": 0.025,
    "sign": 0.705,
    "sketch": 0.9,
}


# Part of the largest elements of heavy-tailed samples (Student's t with four degrees
# of freedom, 1e7 of them), and their part of the squared norm. Gradients of large
# batches have far more in few elements: .78 in 1 %, .92 in 5 %.
_TOP_ENERGY = (
    (1e-4, 0.024), (1e-3, 0.075), (0.01, 0.228), (0.05, 0.465), (0.1, 0.612),
    (0.25, 0.826), (0.5, 0.958), (1.0, 1.0),
)  # fmt: skip


def _top_energy(kept: float) -> float:
    """Squared norm in the largest elements, linear in the logarithm of their part."""
    x = math.log(min(1.0, max(kept, _TOP_ENERGY[0][0])))
    logs = [math.log(part) for part, _ in _TOP_ENERGY]
    return float(np.interp(x, logs, [energy for _, energy in _TOP_ENERGY]))


def _low_rank_energy(part: float) -> float:
    """Part of the squared norm in a rank that is ``part`` of the narrower side.

    A power law through relative errors of .93, .65 and .45 at 1/64, 1/16 and 1/8:
    gradients of a character language model 128 wide, with feedback, in batches so
    small that they are mostly noise. Larger batches are easier.
    """
    return min(0.95, 1.9 * part**0.42)


def _narrow(shape: tuple[int, ...]) -> int:
    """The shorter side of the most square matrix that a shape folds into."""
    best, rows = 1, 1
    for size in shape:
        rows *= size
        best = max(best, min(rows, math.prod(shape) // rows))
    return best


# With feedback the error is not lost but late. The bound of SGD with feedback has
# the compressor's error as (1 - d) / d^2 with d = 1 - e^2, times the squares of
# learning rate and smoothness (S. P. Karimireddy et al., "Error Feedback Fixes
# SignSGD", ICML 2019, theorem II); this stands for that product's root. Assumed.
FEEDBACK_DISCOUNT = 0.25


def effective_error(error: float, *, feedback: bool) -> float:
    """The error that counts against a budget.

    >>> effective_error(0.5, feedback=False)
    0.5
    >>> round(effective_error(0.5, feedback=True), 4)
    0.1667
    """
    if not feedback:
        return error
    return min(error, FEEDBACK_DISCOUNT * error / max(1e-9, 1 - error * error))
