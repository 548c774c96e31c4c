"""Compares predicted times of collectives and products with XLA's own measurements.

    python benchmarks/xla_tables.py --tables FILE [--no-held-out]

Prints a JSON line for each group of rows: their number, the median and the 90th
percentile of the ratio of predicted to measured time, and the fraction of rows within
10, 15, 25 and 40 %. Rows to which constants were fitted do not count (`held_out`),
unless --no-held-out is given. The 90th percentile is that of the ratio's distance from
1: 0.25 means that 90 % of the rows are within 25 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autopar.cluster import LinkSpec, MeshAxis
from autopar.cluster.presets import PRESETS
from autopar.cost.collectives import collective_s

# dtype -> bytes of an element of the operands, and the dtype's name in presets.
TYPES = {
    "bf16xbf16->bf16": (2, "bfloat16"),
    "f32xf32->f32": (4, "float32"),
    "f8e4m3fnxf8e4m3fn->bf16": (1, "float8"),
}
SMALL_BYTES = 1 << 20
# Sizes (log2 of the bytes) and depths whose rows are not used for fits.
UNSEEN_SIZES = (13, 18, 23, 28)
UNSEEN_DEPTH = 1024
# The measurements on 72 devices have other group sizes than those on 64 devices.
UNSEEN_DEVICES = 72
# Half of 8, 64 and 72 devices.
_ONE_WAY_PAIRS = (4, 32, 36)
BOUNDS = (0.10, 0.15, 0.25, 0.40)


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A measured collective; its size is defined as in `autopar.cluster.specs.Kind`."""

    device: str
    kind: str
    group_size: int
    devices: int
    nbytes: float
    seconds: float
    one_way: bool = False

    @property
    def held_out(self) -> bool:
        """Whether the row must not be used for fits."""
        if self.devices == UNSEEN_DEVICES:
            return True
        if int(math.log2(self.nbytes)) in UNSEEN_SIZES:
            return True
        return _hash(self.device, self.kind, self.group_size, self.nbytes) % 5 == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A measured batch of `batch` products; `itemsize` is that of the operands."""

    device: str
    batch: int
    m: int
    n: int
    k: int
    itemsize: int
    dtype: str
    seconds: float

    @property
    def held_out(self) -> bool:
        """Whether the row must not be used for fits; the same for all devices and
        dtypes.
        """
        if self.k == UNSEEN_DEPTH:
            return True
        return _hash(self.batch, self.m, self.n, self.k) % 4 == 0


def _hash(*key: object) -> int:
    text = "|".join(map(str, key))
    return hashlib.sha256(text.encode()).digest()[0]


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def transfers(tables: dict[str, Any]) -> list[Transfer]:
    """The measured collectives."""
    found: list[Transfer] = []
    for row in _rows(tables["collectives"]):
        pairs, kind = row["permute_pairs"], row["collective"].replace("-", "_")
        device = row["device"].lower()
        # Either half of the devices send to the other half, or all devices send.
        one_way = pairs in _ONE_WAY_PAIRS
        if pairs is not None:
            size = devices = 2 * pairs if one_way else pairs
        else:
            size, devices = row["group_size"], row["group_size"] * row["groups"]
        found.append(
            Transfer(
                device, kind, size, devices, row["tensor_bytes"], row["seconds"],
                one_way,
            )
        )  # fmt: skip
    return found


def products(tables: dict[str, Any]) -> list[Product]:
    """The measured matrix products."""
    found: list[Product] = []
    for row in _rows(tables["matmuls"]):
        sides = (row["batch"], row["m"], row["n"], row["k"])
        flops = 2.0 * math.prod(sides)
        for types, tera_flops in row["TFLOP/s by types"].items():
            itemsize, dtype = TYPES[types]
            seconds = flops / tera_flops / 1e12
            device = row["device"].lower()
            found.append(Product(device, *sides, itemsize, dtype, seconds))
    return found


def _axis(device: str, size: int) -> MeshAxis:
    link: LinkSpec = PRESETS[device].inner
    return MeshAxis(name="x", size=size, link=link, level=0)


def predicted_transfer_s(row: Transfer) -> float:
    """The time that the cost model predicts."""
    axis = _axis(row.device, row.group_size)
    return collective_s(row.kind, row.nbytes, [axis])


def predicted_product_s(row: Product) -> float:
    """The time that the cost model predicts."""
    from autopar.cost.compute import product_s

    device = PRESETS[row.device].device
    return product_s(row.dtype, row.itemsize, device, row.batch, row.m, row.n, row.k)


def _line(label: dict[str, object], ratios: Sequence[float]) -> str:
    ordered = sorted(ratios)
    distances = sorted(abs(ratio - 1) for ratio in ratios)
    last = min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)
    figures: dict[str, object] = {
        "rows": len(ordered),
        "median": round(ordered[len(ordered) // 2], 3),
        "p90_off": round(distances[last], 3),
    }
    for bound in BOUNDS:
        share = sum(d <= bound for d in distances) / len(distances)
        figures[f"within_{round(100 * bound)}"] = round(share, 3)
    return json.dumps(label | figures)


def _grouped(
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> dict[tuple[str, ...], list[float]]:
    found: dict[tuple[str, ...], list[float]] = {}
    for key, ratio in rows:
        found.setdefault(key, []).append(ratio)
    return found


def _transfer_keys(row: Transfer) -> Iterator[tuple[str, ...]]:
    size = "small" if row.nbytes < SMALL_BYTES else "large"
    yield ("collectives", size, "all", "all", "all")
    yield ("collectives", size, row.device, "all", "all")
    kind = row.kind + (" one way" if row.one_way else "")
    yield ("collectives", size, row.device, kind, "all")
    yield ("collectives", size, row.device, kind, str(row.group_size))


def _product_keys(row: Product) -> Iterator[tuple[str, ...]]:
    yield ("products", "all", "all", "all")
    yield ("products", row.device, "all", "all")
    yield ("products", row.device, row.dtype, "all")
    yield ("products", row.device, row.dtype, str(row.batch))


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=pathlib.Path, required=True)
    parser.add_argument(
        "--held-out", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--short", action="store_true", help="only whole devices")
    options = parser.parse_args()
    tables = json.loads(options.tables.read_text())
    ratios: list[tuple[tuple[str, ...], float]] = []
    for row in transfers(tables):
        if row.held_out or not options.held_out:
            ratio = predicted_transfer_s(row) / row.seconds
            ratios += [(key, ratio) for key in _transfer_keys(row)]
    for row in products(tables):
        if row.held_out or not options.held_out:
            ratio = predicted_product_s(row) / row.seconds
            ratios += [(key, ratio) for key in _product_keys(row)]
    names = {
        "collectives": ("table", "bytes", "device", "kind", "group"),
        "products": ("table", "device", "dtype", "batch"),
    }
    for key, found in sorted(_grouped(ratios).items()):
        if not options.short or key[-1] == "all":
            print(_line(dict(zip(names[key[0]], key, strict=True)), found))


if __name__ == "__main__":
    main()
