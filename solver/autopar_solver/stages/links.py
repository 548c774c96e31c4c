"""Seconds of what crosses the cuts, from bytes and the alpha-beta model of links."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autopar_errors import InputError


class CarriedValue(NamedTuple):
    """A value that skips layers: made by ``source``, used last by ``target``.

    Stages between them hand it on, and its cotangent back.
    """

    source: int
    target: int
    nbytes: float


def crossing_bytes(
    boundary_bytes: np.ndarray, carried: Iterable[CarriedValue] = ()
) -> np.ndarray:
    """What crosses each cut: the layer's own output, and values that skip it.

    Args:
        boundary_bytes: float64 ``[layers - 1]``, the output of layer ``i`` that layer
            ``i + 1`` reads.
        carried: values that later layers read, too.

    Raises:
        InputError: a carried value is not of a layer and a later one.

    >>> crossing_bytes(np.ones(3), [CarriedValue(0, 2, 10.0)])
    array([11., 11.,  1.])
    """
    crossing = np.array(boundary_bytes, np.float64)
    for value in carried:
        if not 0 <= value.source < value.target <= len(crossing):
            raise InputError(
                "crossing_bytes: a carried value must go from a layer to a later one "
                f"of {len(crossing) + 1} layers, got {value}."
            )
        crossing[value.source : value.target] += value.nbytes
    return crossing


def link_seconds(crossing: np.ndarray, seconds_per_byte: np.ndarray) -> np.ndarray:
    """``[layers - 1, links, links]``: for how long each crossing occupies each link.

    >>> link_seconds(np.array([2.0]), np.array([[0.5]]))
    array([[[1.]]])
    """
    return crossing[:, None, None] * seconds_per_byte[None]
