"""Additional copies of the state that devices hold.

Without donation, a device holds the old and the new state at the same time. A run that
must survive the loss of processes also keeps the states of earlier steps. If only one
process has an array, neighbouring processes also keep copies of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Spares:
    """The number of additional copies of each carried array that a device holds.

    Attributes:
      always: additional copies of every carried array.
      split: further copies of arrays that are sharded over devices.
    """

    always: int = 0
    split: int = 0

    def copies(self, shards: Any) -> Any:
        """Returns how many copies of its shard of an array a device holds in total.

        >>> import numpy as np
        >>> Spares(always=1, split=2).copies(np.array([1, 4]))
        array([2, 4])

        Args:
          shards: the number of shards of the array, a number or an array of numbers.
        """
        return 1 + self.always + self.split * (shards > 1)


NONE = Spares()
