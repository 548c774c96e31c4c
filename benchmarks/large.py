"""Models of realistic size, as train steps on abstract arrays.

Decoders have fused attention (cuDNN's on GPUs, Pallas's on TPUs). All models compute in
bfloat16 with float32 parameters. From 8 billion parameters on, each layer is
rematerialised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import decoder
import mixture
import unet
import workloads

from autopar.cluster import Cluster

CLUSTERS = (
    "8x8:h100",
    "32x8:h100",
    "8x8:a100,network=50Gb/s",
    "16x16:v5e",
    "4x4x4:v5p",
)
ATTENTION = {"gpu": "cudnn", "tpu": "pallas"}
Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """A language model.

    Attributes:
      model: its sizes.
      sequence: tokens of a row.
      rows: rows of a batch for each device.
      remat: rematerialisation, as in `decoder.Run`.
      experts: experts of each layer; None: plain MLPs.
      scanned: whether layers with experts are a `jax.lax.scan`.
    """

    model: decoder.Decoder
    sequence: int
    rows: int
    remat: str
    experts: mixture.Experts | None = None
    scanned: bool = False

    def build(self, cluster: Cluster) -> Built:
        """The step and its arguments for a cluster."""
        run = decoder.Run(
            sequence=self.sequence,
            batch=self.rows * cluster.num_devices,
            dtype="bfloat16",
            remat=self.remat,
            attention=ATTENTION[cluster.device.kind],
        )
        if self.experts:
            return mixture.train_step(
                self.model, self.experts, run, scanned=self.scanned
            )
        return decoder.train_step(self.model, run)


def _decoder(
    family: str, layers: int, d_model: int, heads: int, kv: int, ffn: int, vocab: int
) -> decoder.Decoder:
    return decoder.Decoder(
        family=family,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv,
        head_dim=d_model // heads,
        ffn=ffn,
        vocab=vocab,
    )


LANGUAGE = {
    "gpt-1.3b": Language(
        _decoder("gpt", 24, 2048, 16, 16, 8192, 50304), 2048, 4, "none"
    ),
    "llama-8b": Language(
        _decoder("llama", 32, 4096, 32, 8, 14336, 128256), 4096, 1, "full"
    ),
    "llama-70b": Language(
        _decoder("llama", 80, 8192, 64, 8, 28672, 128256), 4096, 1, "full"
    ),
    "gpt-175b": Language(
        _decoder("gpt", 96, 12288, 96, 96, 49152, 51200), 2048, 1, "full"
    ),
    "mixtral": Language(
        _decoder("llama", 32, 4096, 32, 8, 14336, 32000),
        2048,
        1,
        "full",
        experts=mixture.Experts(8),
    ),
    "mixtral-dropless": Language(
        _decoder("llama", 32, 4096, 32, 8, 14336, 32000),
        2048,
        1,
        "full",
        experts=mixture.Experts(8, dropless=True),
    ),
    "deepseek-v2": Language(
        _decoder("llama", 60, 5120, 40, 40, 1536, 102400),
        4096,
        1,
        "full",
        experts=mixture.Experts(160, chosen=6, shared=2, dropless=True),
    ),
}
LANGUAGE["deepseek-v2-scan"] = dataclasses.replace(
    LANGUAGE["deepseek-v2"], scanned=True
)


def _vit(cluster: Cluster) -> Built:
    """ViT-H/14 with 32 images per device; each layer is rematerialised."""
    return workloads.arguments(
        "vit", layers=32, d_model=1280, heads=16, size=224, patch=14, classes=1000,
        batch=32 * cluster.num_devices, dtype="bfloat16", remat=True,
    )  # fmt: skip


def _unet(cluster: Cluster) -> Built:
    """A U-Net with the widths of Stable Diffusion; 8 latent images of 64 x 64 per
    device.
    """
    return unet.train_step(
        batch=8 * cluster.num_devices,
        size=64,
        widths=(320, 640, 1280),
        dtype="bfloat16",
    )


CASES: dict[str, Callable[[Cluster], Built]] = {
    **{name: case.build for name, case in LANGUAGE.items()},
    "vit-h": _vit,
    "unet": _unet,
}
