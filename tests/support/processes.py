"""Starts scripts of this folder as the processes of one JAX program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from checkout import ROOT

TIMEOUT_S = 240
# The flags of conftest.py, without a number of devices from the shell's flags.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def start_processes(
    script: str, count: int, words: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """Starts processes of a script, each as ``script NUMBER COUNT PORT WORDS...``."""
    port = free_port()
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "solver", ROOT / "passes"))
    # For collectives between processes, XLA needs a thread for each device and its
    # peer. NPROC sets the size of its thread pool.
    env = {**os.environ, "PYTHONPATH": path, "NPROC": "4", "XLA_FLAGS": FLAGS}
    return [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / script),
             str(k), str(count), str(port), *words],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for k in range(count)
    ]  # fmt: skip


def run_processes(script: str, count: int, words: Sequence[str]) -> list[str]:
    """Returns what the processes printed; fails with that output if a process fails."""
    processes = start_processes(script, count, words)
    try:
        logs = [p.communicate(timeout=TIMEOUT_S)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    for p, log in zip(processes, logs, strict=True):
        assert p.returncode == 0, log
    return logs
