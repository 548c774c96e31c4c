"""Rubick's model of a step under data-parallel plans, with its published constants.

Zhang et al., "Rubick: Exploiting job reconfigurability for deep learning cluster
scheduling", MLSys 2025. A backward pass takes ``k_bwd`` forward passes and overlaps
with the exchange of gradients; offloading adds traffic to the host. The constants are
those of the published artifact, for 8 A800 a node.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from autopar.scheduler.jobs import Curve

_MIB = 1024.0 * 1024.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelledProgram:
    """What the model knows of a program.

    Attributes:
      batch: samples of a step.
      forward_ms: milliseconds of a forward pass on one device.
      parameters: millions (2**20) of parameters.
      asked: samples per second of the configuration that slopes are measured in.
      pcie: megabytes per millisecond to the host.
      link: of the links between devices of a node.
      k: (bwd, sync, opt, opt_off, const, off, swap).
      scaled: by how much a forward pass is faster on 2, 4 and 8 devices; () for
        as many times.
      most: samples of a device that fit: with offloading, with sharded state, plain.
    """

    batch: int
    forward_ms: float
    parameters: float
    asked: float
    pcie: float
    link: float
    k: tuple[float, ...]
    scaled: tuple[float, ...] = ()
    most: tuple[float, float, float] = (math.inf, math.inf, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class BestPlan:
    """The best plan on at most so many devices of one node.

    Attributes:
      speed: samples per second; -1 where nothing is known.
      plan: its name.
      devices: how many it uses.
    """

    speed: float
    plan: str
    devices: int


PROGRAMS = {
    "roberta": ModelledProgram(
        batch=64,
        forward_ms=480,
        parameters=355412057 / _MIB,
        asked=64 / 0.234,
        pcie=7.9107385391936935,
        link=50.303643979067175,
        k=(
            1.7226216091452244,
            1.205493103963666,
            1e-08,
            2.200462132207284,
            15.73715000699807,
            16.635258404842535,
            32.9530767089104,
        ),
    ),
    "vit": ModelledProgram(
        batch=64,
        forward_ms=40,
        parameters=85952456 / _MIB,
        asked=64 / 0.049219,
        pcie=6.1646901221266655,
        link=29.7451292741858,
        k=(
            1.0,
            13.54749257672695,
            0.09786337059659733,
            1e-08,
            5.201298157965654,
            15.692686524178942,
            21.647413513688274,
        ),
    ),
    "bert": ModelledProgram(
        batch=32,
        forward_ms=225,
        parameters=336297858 / _MIB,
        asked=32 / 0.15768,
        pcie=64.0,
        link=119.4879085392442,
        k=(
            1.7762507345127174,
            1.1410390978600897,
            1e-08,
            4.400603962116795,
            15.257464643432971,
            37.288983000053264,
            26.221881110226107,
        ),
        scaled=(1.8, 3.2, 5.8),
    ),
    "gpt2": ModelledProgram(
        batch=16,
        forward_ms=1100,
        parameters=1557686400 / _MIB,
        asked=16 / 0.62556,
        pcie=59.720964902105614,
        link=144.83763732303515,
        k=(
            2.2955055547729417,
            71.21658539688131,
            0.05217141753878825,
            4.877226916846699,
            1.786485024931732,
            0.027912731457899787,
            51.48938818523304,
        ),
    ),
    "t5": ModelledProgram(
        batch=16,
        forward_ms=410,
        parameters=1240809472 / _MIB,
        asked=16 / 0.3207,
        pcie=64.0,
        link=161.02246829023724,
        k=(
            1.2754324551852874,
            1.0,
            1e-08,
            3.4538198406863163,
            11.616030890964971,
            224.86968171631415,
            61.68023191529816,
        ),
    ),
    **{
        name: ModelledProgram(
            batch=batch,
            forward_ms=1000,
            parameters=6738423808 / _MIB,
            asked=asked,
            pcie=0.96,
            link=150.0,
            k=(2.0, 10.0, 0.03, 1e-08, 1.0492757598487223, 1.1192066928294584, 1000.0),
            most=(8, 2, 0),
        )
        for name, batch, asked in (("llama7", 8, 8 / 9.4), ("llama30", 4, 4 / 2.759))
    },
}

PER_NODE = 8
_PLANS = ("zero-offload", "zero-dp", "ga")
_SAME = 1.01  # one device more must be worth one per cent


def step_ms(program: ModelledProgram, devices: int, plan: str, again: bool) -> float:
    """Milliseconds of a step on devices of one node.

    Args:
      program: its constants.
      devices: how many.
      plan: ``zero-offload``, ``zero-dp`` or ``ga``.
      again: whether activations are computed again.
    """
    bwd, sync, opt, opt_off, const, off, swap = program.k
    shares = (2, 4, 8)
    if program.scaled:
        by = program.scaled[shares.index(devices)] if devices in shares else 1.0
    else:
        by = float(devices)
    forward = program.forward_ms / by
    traffic = 8 * program.parameters * (devices - 1) / devices / program.link
    overlapped = (traffic**sync + (bwd * forward) ** sync) ** (1 / sync)
    update, moved = opt * program.parameters, 0.0
    if plan == "zero-offload":
        moved = 4 * program.parameters / devices / program.pcie
        overlapped += off + moved
        update = opt_off * program.parameters / devices
    elif plan == "zero-dp":
        update /= devices
    passes = 2 if again else 1
    return passes * forward + overlapped + update + swap + moved + const


def curve_plans(curve: Curve, most: int) -> tuple[BestPlan, ...]:
    """The best number of devices among 0 to so many of a node, for any program.

    Args:
      curve: progress per second of the program.
      most: devices of a node.
    """
    devices = np.arange(1, most + 1)
    found = [BestPlan(-1.0, "", 0)]
    for count, speed in zip(
        devices, curve.goodput(np.ones_like(devices), devices), strict=True
    ):
        fewer = found[-1]
        kept = fewer.devices and fewer.speed * _SAME >= speed
        found.append(fewer if kept else BestPlan(float(speed), "", int(count)))
    return tuple(found)


@functools.cache
def best_plans(application: str) -> tuple[BestPlan, ...]:
    """The best plan on 0 to 8 devices of a node; the program is among `PROGRAMS`."""
    program = PROGRAMS[application]
    found = [BestPlan(-1.0, "", 0)]
    for devices in range(1, PER_NODE + 1):
        best = BestPlan(-1.0, "", devices)
        for again, (place, plan) in itertools.product((False, True), enumerate(_PLANS)):
            fits = program.batch / devices <= program.most[place]
            if program.batch % devices or (again and plan != "ga") or not fits:
                continue
            speed = 1000 * program.batch / step_ms(program, devices, plan, again)
            if speed > best.speed:
                best = BestPlan(speed, plan, devices)
        fewer = found[-1]
        kept = devices > 1 and fewer.speed * _SAME >= best.speed
        found.append(fewer if kept else best)
    return tuple(found)
