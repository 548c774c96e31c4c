"""Roles of operators and inputs, found from the program and its data flow."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence


class Role(enum.Enum):
    """The part of the step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class InputRole(enum.Enum):
    """The kind of an input of the step."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"
    FROZEN = "frozen"
    OTHER = "other"


# JAX's name for the part of a backward pass that recomputes a forward pass.
REPEATED = "rematted_computation"
_WRAPPER = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|jit|pjit)\((.*)\)$")


# Cached: the equations of a layer have few different name stacks, so most calls hit the
# cache.
@functools.lru_cache(maxsize=1 << 12)
def module_path(name_stack: str) -> str:
    """Removes the parts of a name stack that JAX's transformations add.

    >>> module_path("transpose(jvp(GPT))/Block_3/Dense_0")
    'GPT/Block_3/Dense_0'
    """
    parts: list[str] = []
    for part in _split(name_stack):
        while (match := _WRAPPER.match(part)) is not None:
            part = match.group(1)
        parts.extend(p for p in part.split("/") if p)
    return "/".join(parts)


def _split(stack: str) -> list[str]:
    """Splits a name stack at the slashes that are outside of parentheses."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(stack):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            out.append(stack[start:i])
            start = i + 1
    out.append(stack[start:])
    return out


def operator_roles(
    name_stacks: Sequence[str],
    reads: Sequence[Sequence[int]],
) -> tuple[Role, ...]:
    """Assigns a role to each operator.

    JAX's name stack marks differentiated code with ``jvp(...)`` and its transpose with
    ``transpose(...)``. An operator marked ``jvp`` only is forward, and one marked
    ``transpose`` is backward. The role of any other operator follows from its
    dependencies. An operator that a marked operator depends on is forward. An operator
    that depends on the backward pass is update. An operator that only the update reads
    (such as the decay of a moment) is update too. All remaining operators (such as
    those of a metric) are forward.

    Args:
      name_stacks: the name stack of each operator, in program order.
      reads: for each operator, the operators whose results it reads.
    """
    count = len(name_stacks)
    backward = ["transpose(" in s for s in name_stacks]
    forward = [
        "jvp(" in s and not b for s, b in zip(name_stacks, backward, strict=True)
    ]
    for i in range(count - 1, -1, -1):
        if forward[i]:
            for j in reads[i]:
                if j < i and not backward[j]:
                    forward[j] = True
    after = dependents(backward, reads)
    update = [a and not b for a, b in zip(after, backward, strict=True)]
    for i in range(count - 1, -1, -1):
        if update[i]:
            for j in reads[i]:
                if j < i and not backward[j] and not forward[j]:
                    update[j] = True
    return tuple(
        Role.BACKWARD if b else Role.UPDATE if u and not f else Role.FORWARD
        for b, u, f in zip(backward, update, forward, strict=True)
    )


def dependents(marked: Sequence[bool], reads: Sequence[Sequence[int]]) -> list[bool]:
    """Returns, for each operator, whether it is marked or depends on a marked one.

    A loop's carry comes before the body that computes its next value. With loops, one
    pass over the operators is therefore not enough.

    Args:
      marked: for each operator, whether it is marked.
      reads: for each operator, the operators whose results it reads.
    """
    out = list(marked)
    changed = True
    while changed:
        changed = False
        for i, sources in enumerate(reads):
            if not out[i] and any(out[j] for j in sources):
                out[i] = changed = True
    return out


def input_roles(
    *,
    num_inputs: int,
    carried: frozenset[int],
    floating: Sequence[bool],
    read_by: Sequence[Sequence[Role]],
    from_backward: Sequence[bool],
) -> tuple[InputRole, ...]:
    """Assigns a role to each flat input.

    A carried floating-point input is a parameter if the forward pass reads it and its
    new value depends on the backward pass. A carried input that the forward pass does
    not read is optimizer state. An input that is not carried is the batch, until
    `autopar_passes.graph.build` has examined it. All other inputs (batch statistics,
    keys, counters) have the role other.

    Args:
      num_inputs: number of flat inputs.
      carried: inputs that come back as an output.
      floating: for each input, whether it is floating-point.
      read_by: for each input, the roles of the operators that read it.
      from_backward: for each input, whether its next value depends on the backward
        pass.
    """
    out: list[InputRole] = []
    for i in range(num_inputs):
        in_forward = Role.FORWARD in read_by[i]
        if i not in carried:
            out.append(InputRole.BATCH)
        elif floating[i] and in_forward and from_backward[i]:
            out.append(InputRole.PARAMETER)
        elif not in_forward and Role.UPDATE in read_by[i]:
            out.append(InputRole.OPTIMIZER_STATE)
        else:
            out.append(InputRole.OTHER)
    return tuple(out)
