"""Codecs: ways to encode a gradient in fewer bytes.

Importing this package registers the codecs of its modules.
"""

from autopar.compression.codecs import (
    eden,
    lowrank,
    predicted,
    quantise,
    sketch,
    sparse,
    threshold,
)

__all__ = [
    "eden",
    "lowrank",
    "predicted",
    "quantise",
    "sketch",
    "sparse",
    "threshold",
]
