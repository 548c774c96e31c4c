"""Describes the hosts of `bed.py` as a cluster for the planner.

python benchmarks/network/clusters.py links.json --rate 100 > cluster.toml
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cluster import Cluster, CollectiveFit
from autopar.cluster.specs import DeviceSpec
from autopar.profiling.kernels import fit_collective

UNSHAPED_MBIT = 12_000.0
"""What an unshaped pair carries about, measured by one TCP stream."""


def with_scaled_rates(device: DeviceSpec, factor: float) -> DeviceSpec:
    """A device whose rates of computation and of memory are multiplied by a factor."""
    return dataclasses.replace(
        device,
        peak_flops_per_s=tuple((d, factor * f) for d, f in device.peak_flops_per_s),
        vector_flops_per_s=factor * device.vector_flops_per_s,
        memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s,
    )


def fit(
    records: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Fits a line to the times of each collective, group size and rate.

    Args:
      records: measurements with the keys ``rate_mbit`` (0: no limit), ``name``,
        ``group_size``, ``nbytes`` and ``seconds``.
      kinds: name of a collective -> its kind in the cost model; '' if it has no kind.

    Returns:
      For each group: its keys, alpha (``latency_s``), beta (``s_per_byte``, and
      ``large_s_per_byte`` as in `CollectiveFit`) and the error of the fit.
    """
    points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for r in records:
        key = (r["rate_mbit"], r["name"], r["group_size"])
        points[key].append((float(r["nbytes"]), r["seconds"]))
    found: list[dict[str, Any]] = []
    for (rate, name, size), of in points.items():
        # A collective without a kind is fitted as an all-reduce; the fit does not
        # depend on the kind.
        line = fit_collective(kinds[name] or "all_reduce", size, of)
        values = {**dataclasses.asdict(line), "kind": kinds[name]}
        found.append({"rate_mbit": rate, "name": name, **values})
    return found


def described(
    rate_mbit: float | None,
    hosts: int = 4,
    fits: Sequence[Mapping[str, Any]] = (),
) -> Cluster:
    """Hosts with one CPU device each, joined by links of a given rate.

    The hosts are namespaces of one machine, so each has a share of its cores.

    Args:
      rate_mbit: rate in Mbit/s; None: no limit.
      hosts: their number.
      fits: results of `fit`; those of this rate replace the model of the link.
    """
    rate = UNSHAPED_MBIT if rate_mbit is None else rate_mbit
    cluster = Cluster.parse(f"{hosts}x1:cpu,network={rate:g}Mb/s")
    fields = [f.name for f in dataclasses.fields(CollectiveFit)]
    measured = tuple(
        CollectiveFit(**{name: line[name] for name in fields})
        for line in fits
        if line["kind"] and line["rate_mbit"] == (rate_mbit or 0)
    )
    share = min(1.0, (os.cpu_count() or 1) / hosts)
    device = with_scaled_rates(cluster.device, share)
    outer, *inner = cluster.levels
    link = dataclasses.replace(outer.link, measured=measured)
    outer = dataclasses.replace(outer, link=link)
    return dataclasses.replace(cluster, device=device, levels=(outer, *inner))


def load(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """The fits in a file of collectives.py; none without a file."""
    return json.loads(path.read_text())["fits"] if path else []


def machine() -> dict[str, Any]:
    """The properties of this machine on which the times depend."""
    control = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "congestion_control": control.read_text().strip() if control.exists() else "",
        "load": os.getloadavg(),
    }


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("links", type=pathlib.Path, help="the file of collectives.py")
    parser.add_argument("--rate", type=float, required=True, help="Mbit/s")
    parser.add_argument("--hosts", type=int, default=4)
    options = parser.parse_args()
    fits = load(options.links)
    print(described(options.rate, options.hosts, fits).to_toml(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
