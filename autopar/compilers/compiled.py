"""Compiles planned programs for an accelerator, in a separate process."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from autopar.cluster import Cluster
from autopar.cluster.specs import DeviceSpec
from autopar.compilers.options import CompilerOptions, flags, joined, of_tpus
from autopar.compilers.targets import Target, room_options, topology
from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.cost.collectives import collective_s
from autopar.cost.compute import in_table_s, rates_of, roofline_s
from autopar.cost.pricer import Pricer
from autopar.errors import CompileError, PlanError
from autopar_passes.audit.compiled import Done, Event, EventLoop, Start
from autopar_passes.audit.kernels import Kernel, Product
from autopar_passes.audit.partitioned import AuditedCollective

# Without a device the compiler cannot autotune kernels, because it cannot run them.
# Matrix products by Triton need autotuning: without it the compiler may not find a tile
# size.
_GPU_OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "false"}
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
    given: CompilerOptions | None = None,
) -> list[CompiledProgram]:
    """Compiles lowered programs for devices of a cluster, without access to such
    devices.

    The compiler runs in a child process, because it needs another JAX backend than this
    process.

    Args:
      programs: JAX's ``Lowered`` of each program, for the target's platform.
      target: the kind of device to compile for.
      cluster: the devices. A slice of TPUs is given as a whole.
      devices: positions in the cluster of the devices that run the programs; None: all
        devices.
      given: compiler options of the plan.

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
        _run(folder, target, cluster, given or {})
        return [_compiled_program(folder, k) for k in range(len(programs))]


def _compiled_program(folder: pathlib.Path, number: int) -> CompiledProgram:
    memory = json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
    text = (folder / f"{number}.txt").read_text(encoding="utf-8")
    return CompiledProgram(text, Memory(**memory))


def _run(
    folder: pathlib.Path, target: Target, cluster: Cluster, given: CompilerOptions
) -> None:
    """Runs the child process; raises an error if it failed."""
    command = [sys.executable, "-m", "autopar.compilers.child", str(folder)]
    own = _environment(target, cluster, given)
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


def _environment(
    target: Target, cluster: Cluster, given: CompilerOptions
) -> dict[str, str]:
    """Environment variables of the child process: without this process's settings of
    the backend, and with flags for the compiler.

    Options of the plan take precedence over those of the environment, which take
    precedence over those that autopar sets.
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
    needed: dict[str, str] = {}
    if target.kind == "cpu":
        needed = dict(WITH_BARRIERS)
    elif target.kind == "gpu":
        needed = {**_GPU_OPTIONS, **room_options(cluster)}
    # The compiler for TPUs has another variable for the options that only it knows.
    tpus = of_tpus(given) if target.kind == "tpu" else {}
    wanted = joined(needed, given, "") or {}
    said = os.environ.get("XLA_FLAGS", "").split()
    said = [f for f in said if "host_platform_device_count" not in f]
    names = {f.split("=")[0].removeprefix("--") for f in said}
    kept = {n: v for n, v in wanted.items() if n in given or n not in names}
    own["XLA_FLAGS"] = " ".join([*said, *flags(kept)])
    if tpus:
        before = os.environ.get("LIBTPU_INIT_ARGS", "").split()
        own["LIBTPU_INIT_ARGS"] = " ".join([*before, *flags(tpus)])
    return {**os.environ, **own}


# Computes the time of a compiled program from its schedule, by the cost model.
#
# `timeline` simulates two queues that run in parallel: kernels in program order, and
# messages in the order in which the program starts them. A ``-done`` operation of the
# program waits for a message. Kernels after it wait, too. The time for which kernels
# wait is exposed communication.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    """How long a step takes on one device.

    Attributes:
      kernel_s: seconds of kernels.
      communication_s: seconds of all messages, whether kernels run meanwhile or not.
      exposed_s: seconds for which kernels wait for messages.
      messages: number of messages.
      hidden: number of messages that have kernels between their start and their
        ``-done``.
      cycles: sum of the compiler's own estimates for kernels, in clock cycles.
    """

    kernel_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    messages: float = 0.0
    hidden: float = 0.0
    cycles: float = 0.0

    def __add__(self, other: Self) -> Self:
        """The timeline of two parts of a step that run one after the other."""
        names = [f.name for f in dataclasses.fields(self)]
        return type(self)(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def __mul__(self, times: float) -> Self:
        """The timeline of a part that runs several times."""
        names = [f.name for f in dataclasses.fields(self)]
        return type(self)(**{n: getattr(self, n) * times for n in names})

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.kernel_s + self.exposed_s


def timeline(events: Iterable[Event], pricer: Pricer) -> DeviceTimeline:
    """Simulates the events of a program. At the start and the end of a loop both queues
    are empty.
    """
    total = DeviceTimeline()
    free_s = 0.0
    ends: dict[str, tuple[float, float]] = {}
    for event in events:
        now_s = total.step_s
        match event:
            case Kernel():
                total += _kernel(event, pricer.cluster.device)
            case Start():
                seconds = message_s(event.collectives, pricer)
                free_s = max(now_s, free_s) + seconds
                ends[event.name] = free_s, total.kernel_s
                wait_s = free_s - now_s if event.waits else 0.0
                total += DeviceTimeline(
                    communication_s=seconds, exposed_s=wait_s, messages=1.0
                )
            case Done() if event.name in ends:
                end_s, before_s = ends[event.name]
                hidden = float(total.kernel_s > before_s)
                total += DeviceTimeline(
                    exposed_s=max(0.0, end_s - now_s), hidden=hidden
                )
            case Done():
                pass
            case EventLoop():
                total += timeline(event.body, pricer) * event.trips
    return total


def message_s(collectives: Iterable[AuditedCollective], pricer: Pricer) -> float:
    """Seconds of a message with all its arrays, by the cost model."""
    found = tuple(collectives)
    names = pricer.mesh.names
    axes = tuple(pricer.mesh.axes[names.index(n)] for n in found[0].axes)
    whole = math.prod(axis.size for axis in axes)
    if not axes or found[0].group > whole:
        return 0.0
    if found[0].group < whole:
        # If the group is only a part of a mesh axis, the last axis that is long enough
        # is assumed, because it has the fastest links.
        axes = tuple(a for a in axes if a.size >= found[0].group)[-1:] or axes[-1:]
    nbytes = sum(c.nbytes for c in found)
    return pricer.skew(axes) * collective_s(found[0].kind, nbytes, axes)


def _kernel(kernel: Kernel, device: DeviceSpec) -> DeviceTimeline:
    return DeviceTimeline(
        kernel_s=kernel_s(kernel, device) + device.kernel_latency_s,
        cycles=kernel.cycles,
    )


def kernel_s(kernel: Kernel, device: DeviceSpec) -> float:
    """Seconds of a kernel without its launch, by the same formulas as for the operators
    of a plan.

    For matrix products, the device's table of measurements is used if there is one. No
    kernel takes less than the time to move its bytes.
    """
    memory_s = roofline_s(0.0, kernel.nbytes, kernel.dtype, device, is_matrix=False)
    if not kernel.products:
        return float(memory_s)
    products = sum(_product_s(p, device) for p in kernel.products)
    return max(products, kernel.nbytes / device.memory_bandwidth_bytes_per_s)


def _product_s(product: Product, device: DeviceSpec) -> float:
    if rates_of(device, product.itemsize) is None:
        return float(
            roofline_s(product.flops, 0.0, product.dtype, device, is_matrix=True)
        )
    batch = np.array([product.batch])
    sides = np.array([[product.rows, product.columns, product.depth]])
    found = in_table_s(product.dtype, product.itemsize, batch, sides, 0.0, device)
    return float(found[0])
