"""The devices that the hand-written kernels of a step can run on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.errors import PlanError
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.rules.kernel import KernelWork

# JAX's name of the platform that a program is lowered for, by kind of device.
_LOWERED_FOR = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


def kernels(graph: OperatorGraph) -> tuple[KernelWork, ...]:
    """Returns the kernels of a graph, each once."""
    return tuple(dict.fromkeys(op.kernel for op in graph.operators if op.kernel))


def lowering_platform(graph: OperatorGraph, kind: str) -> str:
    """Returns the platform for which a program is lowered without devices.

    Args:
      graph: of the step. Without kernels any platform will do, and the host is sure
        to have what its CPU needs.
      kind: of the cluster's devices: "gpu", "tpu" or "cpu".

    Raises:
      PlanError: no platform can run all of the kernels.
    """
    bound = [k for k in kernels(graph) if k.platforms]
    if not bound:
        return _LOWERED_FOR["cpu"]
    common = set.intersection(*(set(k.platforms) for k in bound))
    if not common:
        names = ", ".join(f"'{k.name}' ({' or '.join(k.platforms)})" for k in bound)
        raise PlanError(
            f"no device can run all kernels of this step: {names}. Use kernels that "
            "were written for the same kind of device."
        )
    return _LOWERED_FOR[kind if kind in common else min(common)]


def check_runnable(step: str, graph: OperatorGraph, devices: Iterable[object]) -> None:
    """Checks that the kernels of a step can run on devices.

    Args:
      step: name of the step.
      graph: of the step.
      devices: JAX's devices, each with a ``platform``.

    Raises:
      PlanError: a kernel was written for other devices.
    """
    platforms = {str(getattr(d, "platform", "")) for d in devices}
    found = {_kind(p) for p in platforms}
    wrong = [k for k in kernels(graph) if k.platforms and not found <= {*k.platforms}]
    if wrong:
        raise PlanError(_message(step, wrong, sorted(platforms)))


def _kind(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def _message(step: str, wrong: Sequence[KernelWork], platforms: Sequence[str]) -> str:
    first = wrong[0]
    return (
        f"the step '{step}' cannot run on {', '.join(platforms)} devices: its kernel "
        f"'{first.name}' runs on {' or '.join(first.platforms)} devices only. "
        "Planning needs no device: save the plan here, and run it where the devices "
        "are. To run the step here, use an attention without kernels."
    )
