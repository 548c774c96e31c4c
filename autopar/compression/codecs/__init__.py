"""Codecs: ways to encode a gradient in fewer bytes.

Importing the package fills the registry with the codecs below.
"""

from autopar.compression.codecs import (
    dense,
    lowrank,
    predicted,
    quantise,
    sketch,
    sparse,
    threshold,
)

__all__ = [
    "dense",
    "lowrank",
    "predicted",
    "quantise",
    "sketch",
    "sparse",
    "threshold",
]
