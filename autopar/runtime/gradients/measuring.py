"""What is measured of gradients where codecs sum them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A measurement of a bucket of gradients, on one device's arrays.

    It runs where the bucket is summed (`autopar.runtime.gradients.synchroniser`). What
    a codec reads and what it has received are in memory there, so a branch that is
    seldom taken can read them, and a step that does not take it writes nothing for it.

    Attributes:
      look: of the parts of ``given``, of the partial gradients on this device and of
        the sums in the layouts of `Member.result`; returns a row, (1, k).
      given: other arrays that it reads.
      specs: their partition specs.
      seldom: whether the sums are read in a branch that is seldom taken. They are made
        anew there.
    """

    look: Callable[[Any, Arrays, Callable[[], Arrays]], jax.Array]
    given: Any
    specs: Any
    seldom: bool
