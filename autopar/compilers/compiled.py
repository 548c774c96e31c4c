"""Compiles planned programs for an accelerator, in a separate process."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.compilers.targets import Target, room_options, topology
from autopar.errors import CompileError, PlanError

# Without a device the compiler cannot autotune kernels, because it cannot run them.
# Matrix products by Triton need autotuning: without it the compiler may not find a tile
# size.
_GPU_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
# The option with which `autopar.runtime` compiles planned steps for CPUs, too.
_WITH_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
_MOST_LINES = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How much memory a program needs on one device, according to the compiler.

    Attributes:
      argument_bytes: bytes of the arguments.
      output_bytes: bytes of the results.
      alias_bytes: bytes of those results that are written into buffers of arguments.
      temp_bytes: bytes of temporary buffers.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory that a device must have to run the program."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program after the compiler's optimizations, and the memory that it needs.

    Attributes:
      text: the optimized HLO module as text.
      memory: memory that the program needs on one device.
    """

    text: str
    memory: Memory


def check_target(target: Target, cluster: Cluster) -> None:
    """Checks, before any work, that programs can be compiled for a cluster.

    Raises:
      PlanError: the cluster does not consist of the target's devices, or the compiler
        is not installed; the message names the extra that installs the compiler.
    """
    topology(target, cluster)
    try:
        found = importlib.util.find_spec(target.module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise PlanError(
            f"compiling for {target.name} needs XLA's {target.kind.upper()} compiler, "
            f"which is not installed: pip install 'autopar[{target.extra}]'. "
            "No device is needed."
        )


def compile_for(
    programs: Sequence[Any],
    target: Target,
    cluster: Cluster,
    devices: Sequence[int] | None = None,
) -> list[CompiledProgram]:
    """Compiles lowered programs for devices of a cluster, without access to such
    devices.

    The compiler runs in a child process, because it needs another JAX backend than this
    process.

    Args:
      programs: JAX's ``Lowered`` of each program, for the target's platform.
      target: the kind of device to compile for.
      cluster: the devices. A slice of TPUs is given as a whole.
      devices: the positions of those that run the programs; None: all.

    Raises:
      PlanError: the compiler is not installed, or the cluster does not consist of the
        target's devices.
      CompileError: the compiler refuses a program.
    """
    check_target(target, cluster)
    with tempfile.TemporaryDirectory(prefix="autopar-compile-") as name:
        folder = pathlib.Path(name)
        for k, lowered in enumerate(programs):
            module = io.BytesIO()
            lowered.compiler_ir().operation.write_bytecode(module)
            (folder / f"{k}.mlirbc").write_bytes(module.getvalue())
        request = {
            "platform": target.platform,
            "topology": topology(target, cluster),
            "description": target.gpu.text() if target.gpu else "",
            "devices": list(devices or range(cluster.num_devices)),
            "programs": len(programs),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run(folder, target, cluster)
        return [_compiled_program(folder, k) for k in range(len(programs))]


def _compiled_program(folder: pathlib.Path, number: int) -> CompiledProgram:
    memory = json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
    text = (folder / f"{number}.txt").read_text(encoding="utf-8")
    return CompiledProgram(text, Memory(**memory))


def _run(folder: pathlib.Path, target: Target, cluster: Cluster) -> None:
    """Runs the child process; raises an error if it failed."""
    command = [sys.executable, "-m", "autopar.compilers.child", str(folder)]
    own = _environment(target, cluster)
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    written = folder / "error.txt"
    said = written.read_text(encoding="utf-8") if written.exists() else done.stderr
    lines = [line for line in said.strip().splitlines() if line.strip()]
    text = " ".join((lines[:_MOST_LINES] if written.exists() else lines[-4:]) or ["-"])
    raise CompileError(
        f"XLA's compiler for {target.name} refuses the step "
        f"(exit code {done.returncode}): {text}"
    )


def _environment(target: Target, cluster: Cluster) -> dict[str, str]:
    """Environment variables of the child process: without this process's settings of
    the backend, and with flags for the compiler.
    """
    path = os.pathsep.join([p for p in sys.path if p] or [os.getcwd()])
    own = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        # The compiler opens no device, so several processes may compile at the same
        # time.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-32" if target.name == "v5p" else "v5litepod-16",
    }
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in given if "host_platform_device_count" not in f]
    if target.kind == "cpu":
        flags.append(_WITH_BARRIERS)
    if target.kind == "gpu":
        said = {f.split("=")[0] for f in flags}
        room = [f"--{name}={value}" for name, value in room_options(cluster).items()]
        own_flags = [*_GPU_FLAGS, *room]
        flags = [*flags, *(f for f in own_flags if f.split("=")[0] not in said)]
    return {**os.environ, **own, "XLA_FLAGS": " ".join(flags)}
