"""Measured rates of devices and links, between which the cost model interpolates."""

from autopar.cluster.rates.tables import (
    DEVICE_RATES,
    LINK_RATES,
    NCCL_CLASSES,
    CollectiveKnots,
    PartnerRates,
    ProductRates,
    collective_knots,
    partner_rates,
    product_rates,
)

__all__ = [
    "DEVICE_RATES",
    "LINK_RATES",
    "NCCL_CLASSES",
    "CollectiveKnots",
    "PartnerRates",
    "ProductRates",
    "collective_knots",
    "partner_rates",
    "product_rates",
]
