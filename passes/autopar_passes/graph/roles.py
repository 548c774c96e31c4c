"""Roles of operators and inputs, found from the program and its data flow."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence


class Role(enum.Enum):
    """The part of the step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class InputRole(enum.Enum):
    """What an input of the step is."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"
    FROZEN = "frozen"
    OTHER = "other"


# JAX's name for the part of a backward pass that repeats a forward pass.
REPEATED = "rematted_computation"
_WRAPPER = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|jit|pjit)\((.*)\)$")


# A layer's equations share a few name stacks.
@functools.lru_cache(maxsize=1 << 12)
def module_path(name_stack: str) -> str:
    """Strips what JAX's transformations add to a name stack.

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
    """Splits at the slashes that stand outside of parentheses."""
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

    JAX's name stack marks differentiated code with ``jvp(...)`` and its
    transpose with ``transpose(...)``. The rest is decided by data flow: what a
    differentiated operator reads, directly or not, is forward; what depends on
    the backward pass is the update, and so is what only the update reads (the
    decay of a moment); anything else (metrics) is forward.

    Args:
      name_stacks: of each operator, in program order.
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
    """Returns which operators depend on a marked one, or are marked.

    A loop's carry comes before the body that makes its next value, so one pass
    over the operators is not enough where there are loops.

    Args:
      marked: of each operator.
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

    Carried floating-point state that the forward pass reads and whose new
    value depends on the backward pass is a parameter; carried state that the
    forward pass does not read is optimizer state; what is not carried is the
    batch, until `autopar_passes.graph.batch` has looked at it; the rest (batch
    statistics, keys, counters) is other.

    Args:
      num_inputs: number of flat inputs.
      carried: inputs that come back as an output.
      floating: whether each input is floating-point.
      read_by: roles of the operators that read each input.
      from_backward: whether the output that carries the input on depends on
        the backward pass.
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
