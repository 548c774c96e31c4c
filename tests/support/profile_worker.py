"""A process of a program that profiles its devices; test_profile.py runs it.

Usage: python profile_worker.py PROCESS COUNT PORT FOLDER
"""

from __future__ import annotations

import pathlib
import sys

import jax

DEVICES = 2


def main() -> None:
    process, count, port = map(int, sys.argv[1:4])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(
        f"localhost:{port}", count, process, initialization_timeout=240
    )
    from autopar.profiling import kernels, profile

    kernels.LONG_RUN_S = 0.002
    settings = profile.ProfileSizes(
        dtypes=("float32",),
        matmul_sizes=(32, 64),
        stream_bytes=1 << 16,
        collective_bytes=(1 << 10, 1 << 14),
        check_matmul_size=48,
        check_bytes=(1 << 12,),
        rounds=1,
    )
    found = profile.run(settings=settings)
    folder = pathlib.Path(sys.argv[4])
    profile.save(found.cluster, folder / f"{process}.toml")
    (folder / f"{process}.txt").write_text(str(found))


if __name__ == "__main__":
    main()
