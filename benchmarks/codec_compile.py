"""CPU seconds to trace, lower and compile a step with codecs.

    python benchmarks/codec_compile.py --examples gpt resnet --codecs none int8 int4
    python benchmarks/codec_compile.py --repeat 3

The steps are those of the examples, with data parallelism over four simulated devices.
With "none" the compiler sums the gradients. Each line is a separate step in this
process. No step runs, and no cache is read. ``--repeat`` repeats all lines and prints
medians. Instructions are those of the compiled program.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from typing import Any

import jax
import workloads
from jax.sharding import PartitionSpec

WORKERS = 4
HEADING = ("example", "codec", "lower s", "compile s", "instructions")


def seconds(name: str, codec: str, rows: int) -> tuple[float, float, int]:
    """CPU seconds of lowering (tracing included) and of compiling, and the number of
    instructions.
    """
    import autopar

    step, (*state, batch) = workloads.arguments(name, batch=rows)
    planned = autopar.parallelize(
        step,
        cluster=f"{WORKERS}x1:cpu,network=100Mb/s",
        compression=codec,
        axis_names=("data",),
        max_axes=1,
        pins={"batch*": PartitionSpec("data")},
    ).prepare(*state, batch)
    begin = time.process_time()
    lowered = planned.lower()
    middle = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    count = compiled.as_text().count(" = ")
    return middle - begin, end - middle, count


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", nargs="+", default=["gpt", "resnet"])
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORKERS)
    jax.config.update("jax_enable_compilation_cache", False)
    found = collections.defaultdict[tuple[str, str], list[Any]](list)
    for _ in range(options.repeat):
        for name in options.examples:
            for codec in options.codecs:
                made = seconds(name, codec, options.rows)
                found[name, codec].append(made)
                jax.clear_caches()
    workloads.row(*HEADING)
    workloads.row(*["---"] * len(HEADING))
    for (name, codec), rows in found.items():
        lower, compiling, count = zip(*rows, strict=True)
        workloads.row(
            name,
            codec,
            f"{statistics.median(lower):.1f}",
            f"{statistics.median(compiling):.1f}",
            count[0],
        )


if __name__ == "__main__":
    main()
