"""A process of a program whose last process fails; test_multiprocess.py runs it.

Usage: python ending_worker.py PROCESS COUNT PORT STEPS
"""

from __future__ import annotations

import sys

import jax


def main() -> None:
    process, count, port, steps = map(int, sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"localhost:{port}", count, process, initialization_timeout=240
    )
    import small_step

    import autopar

    run = autopar.parallelize(small_step.step, cluster=f"{count}:cpu")
    w = small_step.state()
    for k in range(steps + 2):
        if k == steps and process == count - 1:
            raise ZeroDivisionError("no more data")
        w, loss = run(w, small_step.batch(12))
        float(loss)


if __name__ == "__main__":
    main()
