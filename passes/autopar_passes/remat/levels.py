"""What is kept of a layer that is computed again."""

from __future__ import annotations

from collections.abc import Collection

from autopar_errors import InputError
from autopar_passes.program.equations import Equation, Program

FULL, DOTS = "full", "dots"
# What may be kept, beside named values.
LEVELS = (FULL, DOTS)
# A level that keeps named values begins so; the names follow, with commas between.
NAMES = "names="


class RematError(InputError):
    """The layers of a program cannot be computed again as is asked for."""


def names_of(level: str) -> tuple[str, ...]:
    """The names of the values that a level keeps; empty for other levels.

    >>> names_of("names=attn_out,mlp_in")
    ('attn_out', 'mlp_in')
    """
    if not level.startswith(NAMES):
        return ()
    return tuple(level.removeprefix(NAMES).split(","))


def names_in(program: Program) -> tuple[str, ...]:
    """The names that `jax.ad_checkpoint.checkpoint_name` gives in a program, sorted."""
    return tuple(sorted({v.name for v in program.values} - {""}))


def is_level(level: str) -> bool:
    """Whether a text is a level, of whatever names.

    >>> [is_level(text) for text in ("dots", "names=a,b", "names=", "names=a,,b")]
    [True, True, False, False]
    """
    return level in LEVELS or (bool(names_of(level)) and all(names_of(level)))


def check_level(program: Program, level: str) -> None:
    """Checks that a program can keep what a level says.

    Raises:
      RematError: there is no such level, or no value of such a name.
    """
    if not is_level(level):
        raise RematError(
            f"level '{level}': there are {', '.join(LEVELS)} and names=NAME,NAME."
        )
    known = names_in(program)
    if missing := [name for name in names_of(level) if name not in known]:
        has = f"it has {', '.join(known)}" if known else "it names none"
        raise RematError(
            f"no value of the step is named '{missing[0]}' by "
            f"jax.ad_checkpoint.checkpoint_name; {has}."
        )


def keeps(level: str, eqn: Equation, name: str, names: Collection[str]) -> bool:
    """Whether a level keeps a result of an equation.

    Args:
      level: the level.
      eqn: the equation.
      name: of the result.
      names: those of the level.
    """
    return is_product(eqn) if level == DOTS else name in names


def is_product(eqn: Equation) -> bool:
    """Whether ``dots`` keeps the results of an equation."""
    if eqn.primitive == "dot_general":
        _, (left, right) = eqn.params["dimension_numbers"]
        return not left and not right
    return eqn.primitive in ("conv_general_dilated", "ragged_dot_general")
