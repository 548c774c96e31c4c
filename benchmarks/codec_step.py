"""Time of a whole step with codecs on simulated devices, by operator.

    python benchmarks/codec_step.py dense int8 int4:hadamard=false
    python benchmarks/codec_step.py int8 --operations 12

The character GPT of `benchmarks/network` is trained with data parallelism over four
simulated devices that share this machine's cores. Their links cost almost nothing, so
the time of a codec is its local work, compiled by XLA as a part of the step.
(`codec_cost.py` times a codec alone.) With "none" the compiler sums the gradients;
"hand:int8" is `benchmarks/network/handwritten.py`. The configurations run in turns; the
figures are medians. ``--operations`` profiles some more steps and prints the operators
with the most thread time, summed over all devices.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import pathlib
import re
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import workloads

sys.path.append(str(pathlib.Path(__file__).parent / "network"))

WORKERS = 4
PROFILED = 4


def planned(workload: Any, codec: str) -> Any:
    """The step with one codec for all gradients, in data-parallel layouts."""
    import handwritten
    import time_to_loss

    import autopar

    if codec == time_to_loss.HANDWRITTEN:
        return handwritten.HandwrittenStep(workload)
    plan = time_to_loss.data_parallel_plan(workload)
    if codec != "none":
        plan = autopar.plan(
            workload.step,
            jax.eval_shape(workload.create),
            jax.eval_shape(lambda: workload.batch(0)),
            cluster=autopar.Cluster.parse(f"{WORKERS}:cpu"),
            compression=codec,
            layouts=plan,
        )
    return autopar.parallelize(workload.step, plan=plan)


def operations(step: Any, state: Any, workload: Any) -> collections.Counter[str]:
    """Milliseconds of a step by operator, summed over devices."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for k in range(PROFILED):
                state, _ = jax.block_until_ready(step(state, workload.batch(k)))
        (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spent: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            name = re.sub(r"[.\d]+$", "", event["name"])
            spent[name] += event["dur"] / 1e3 / PROFILED
    return spent


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("codecs", nargs="*", default=["none", "dense", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--operations", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WORKERS)
    import language_model
    import worker

    worker.count = lambda: WORKERS
    workload = language_model.build(0)
    steps: dict[str, list[Any]] = {}
    for codec in options.codecs:
        step = planned(workload, codec)
        state = step.init(workload.create, batch=workload.batch(0))
        state, _ = jax.block_until_ready(step(state, workload.batch(0)))
        steps[codec] = [step, state]
    times = collections.defaultdict[str, list[float]](list)
    for k in range(options.rounds):
        for codec, entry in steps.items():
            batch = workload.batch(k)
            start = time.perf_counter()
            entry[1], _ = jax.block_until_ready(entry[0](entry[1], batch))
            times[codec].append(1e3 * (time.perf_counter() - start))
    workloads.row("gradients", "ms a step", "least")
    workloads.row(*["---"] * 3)
    for codec, spent in times.items():
        workloads.row(codec, f"{statistics.median(spent):.1f}", f"{min(spent):.1f}")
    if options.operations:
        for codec, (step, state) in steps.items():
            print(f"\n{codec}, ms of all devices:")
            found = operations(step, state, workload)
            for name, spent in found.most_common(options.operations):
                print(f"  {spent:8.2f}  {name}")


if __name__ == "__main__":
    main()
