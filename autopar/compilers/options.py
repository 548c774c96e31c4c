"""The options of XLA's compiler with which the programs of a plan are compiled.

Some options belong to a plan because its programs need them, others because a user gave
them (``compiler_options=``). XLA knows all of them by name, and all of its backends but
that of TPUs have one list of options.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax

from autopar.errors import PlanError
from autopar.units import guess

CompilerValue: TypeAlias = bool | int | float | str
CompilerOptions: TypeAlias = Mapping[str, CompilerValue]

# The option with the names of passes to leave out, separated by commas.
_DISABLED_PASSES: Final = "xla_disable_hlo_passes"
# Only the compiler for TPUs knows options with this prefix.
_OF_TPUS: Final = "xla_tpu_"


def joined(
    needed: Mapping[str, str], given: CompilerOptions, platform: str
) -> dict[str, CompilerValue] | None:
    """The options of a program; None: the compiler's defaults.

    A given option takes precedence over one that the program needs, except that passes
    that one of the two leaves out are left out. Other platforms do not get the options
    of TPUs.

    >>> joined({"xla_disable_hlo_passes": "cse_barrier_expander"},
    ...        {"xla_disable_hlo_passes": "dce", "xla_tpu_x": 1}, "cpu")
    {'xla_disable_hlo_passes': 'cse_barrier_expander,dce'}

    Args:
      needed: the options that the program needs.
      given: the options of its plan.
      platform: JAX's name of the platform that the program is compiled for.

    Raises:
      PlanError: XLA has no such option as a given one, or does not take its value.
    """
    check_options(given, "Plan.compiler_options")
    others = {} if platform == "tpu" else of_tpus(given)
    used = {name: value for name, value in given.items() if name not in others}
    out: dict[str, CompilerValue] = {**needed, **used}
    passes = [str(x[_DISABLED_PASSES]) for x in (needed, used) if _DISABLED_PASSES in x]
    if passes:
        out[_DISABLED_PASSES] = ",".join(passes)
    return out or None


def flags(options: CompilerOptions) -> list[str]:
    """The options as words of ``XLA_FLAGS``.

    >>> flags({"xla_allow_excess_precision": True, "xla_backend_optimization_level": 1})
    ['--xla_allow_excess_precision=true', '--xla_backend_optimization_level=1']
    """
    return [f"--{name}={_text(value)}" for name, value in options.items()]


def of_tpus(options: CompilerOptions) -> dict[str, CompilerValue]:
    """The options that only the compiler for TPUs knows."""
    return {n: value for n, value in options.items() if n.startswith(_OF_TPUS)}


def options_text(options: CompilerOptions) -> str:
    """The options as text, such as ``xla_cpu_enable_fast_math=true``."""
    return ", ".join(f"{name}={_text(value)}" for name, value in options.items())


def _text(value: CompilerValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_options(options: CompilerOptions, where: str = "compiler_options") -> None:
    """Checks that XLA knows options and takes their values.

    Options of TPUs are not checked, because only their compiler knows them.

    Args:
      options: the options, by name.
      where: who gave them, for errors.

    Raises:
      PlanError: XLA has no such option, or does not take its value.
    """
    for name in options:
        if name.startswith("-"):
            raise PlanError(
                f"{where}: '{name}': leave out the dashes of the name, as in "
                f"'{name.lstrip('-')}'."
            )
    checked = {n: value for n, value in options.items() if not n.startswith(_OF_TPUS)}
    if checked and (said := _refusal(tuple(checked.items()))):
        raise PlanError(
            f"{where}: XLA refuses {options_text(checked)}: {said.rstrip('.')}. Names "
            "are those of the flags in XLA_FLAGS, without the dashes."
        )


@functools.lru_cache(maxsize=128, typed=True)
def _refusal(options: tuple[tuple[str, CompilerValue], ...]) -> str:
    """XLA's reason to refuse options; '' if XLA takes them."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves out CPUs
        device = jax.local_devices()[0]
    lowered = jax.jit(lambda x: x).lower(jax.device_put(0.0, device))
    given: Any = dict(options)
    try:
        lowered.compile(compiler_options=given)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return ""


def read_options(words: Sequence[str]) -> dict[str, CompilerValue]:
    """Parses options of a command line, such as ``xla_cpu_enable_fast_math=true``.

    Raises:
      PlanError: a word has no name or no value.
    """
    out: dict[str, CompilerValue] = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.strip().removeprefix("--")
        if not (name and sign):
            raise PlanError(
                f"--compiler-option {word}: expected name=value, such as "
                "xla_gpu_enable_latency_hiding_scheduler=true."
            )
        out[name] = guess(value.strip())
    return out
