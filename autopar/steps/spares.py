"""Spare copies of the state that devices hold beside the one in use.

A step that does not consume its state holds the old one and the new one at once. A run
that is to outlive processes keeps the states of earlier steps, and those of neighbours,
where an array lies on one process alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Spares:
    """How many more copies of each carried array a device holds.

    Attributes:
      always: of every carried array.
      split: of those that are split over devices, in addition.
    """

    always: int = 0
    split: int = 0

    def copies(self, shards: Any) -> Any:
        """Copies that a device holds of its part of an array, with the one in use.

        >>> import numpy as np
        >>> Spares(always=1, split=2).copies(np.array([1, 4]))
        array([2, 4])

        Args:
          shards: into how many parts the array is split; numbers or an array.
        """
        return 1 + self.always + self.split * (shards > 1)


NONE = Spares()
