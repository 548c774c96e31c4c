"""Policies: they change the codecs of gradients during training.

>>> import autopar.compression.policies as policies
>>> policies.GraVAC(levels=policies.topk_levels(10, 100)).every
5
"""

from autopar.compression.policies.accordion import Accordion
from autopar.compression.policies.choosing import AcrossFamilies, LGreCo
from autopar.compression.policies.dct import Dct
from autopar.compression.policies.gravac import GraVAC, topk_levels
from autopar.compression.policies.probe import (
    QUANTISERS,
    Probe,
    powersgd_family,
    topk_family,
)
from autopar.compression.policies.warm_up import WarmUp

__all__ = [
    "QUANTISERS",
    "Accordion",
    "AcrossFamilies",
    "Dct",
    "GraVAC",
    "LGreCo",
    "Probe",
    "WarmUp",
    "powersgd_family",
    "topk_family",
    "topk_levels",
]
