"""The options for planning and running a step, parsed and checked in one place."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster, ClusterError
from autopar.compilers.options import (
    CompilerOptions,
    check_options,
)
from autopar.compilers.options import (
    read_options as read_compiler_options,
)
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import cut_codecs_text, gather_codec
from autopar.errors import PlanError
from autopar.planner.hints import LogicalRules, Pins, logical_pins, parse_pins
from autopar.planner.option_texts import OPTIONS, PLANNING, Option
from autopar.plans import NO_SCHEDULE, SCHEDULES, Plan
from autopar.steps import spares
from autopar.steps.offload import OFFLOADS
from autopar.steps.spares import Spares
from autopar_errors import InputError
from autopar_passes.program.calls import BatchNames, StepCall
from autopar_passes.remat.copies import FULL, is_level

# A function that returns whether an option accepts a value.
Check = Callable[[Any], bool]


def parsed_codec(mode: str) -> Codec | None:
    """Returns the codec that ``compression=`` names; None for ``none`` and ``auto``.

    Raises:
      PlanError: there is no such codec.
    """
    if mode in ("none", "auto"):
        return None
    if not isinstance(mode, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"compression={mode!r}: expected 'none', 'auto' or the text of a codec, "
            "such as 'int8'."
        )
    try:
        return parse_codec(mode)
    except ValueError as error:
        raise PlanError(f"compression={mode!r}: {error}") from error


def _whole(least: int) -> Callable[[Any], bool]:
    """Returns a check that a value is a whole number of at least ``least``."""
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= least


def _number(least: float) -> Callable[[Any], bool]:
    """Returns a check that a value is a finite number of at least ``least``."""

    def valid(x: Any) -> bool:
        real = isinstance(x, numbers.Real) and not _same(type(x), bool)
        return real and least <= float(cast("Any", x)) < math.inf

    return valid


def _any(*allowed: Any) -> Callable[[Any], bool]:
    """A check that a value equals one of ``allowed``, or passes a check in it."""
    return lambda x: any(a(x) if callable(a) else _same(a, x) for a in allowed)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _names(least: int = 1) -> Callable[[Any], bool]:
    """A check that a value is a sequence of at least ``least`` different names."""

    def valid(given: Any) -> bool:
        if isinstance(given, str) or not isinstance(given, Sequence):
            return False
        names = list(cast("Sequence[Any]", given))
        texts = all(isinstance(name, str) and name for name in names)
        return texts and len(set(names)) == len(names) >= least

    return valid


def _has_pins(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(spec, PartitionSpec)
        for spec in cast("Mapping[str, Any]", given).values()
    )


def _pairs(given: Any) -> bool:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        return False
    return all(
        isinstance(x, Sequence) and len(cast("Sequence[Any]", x)) == 2
        for x in cast("Sequence[Any]", given)
    )


def _shares(given: Any) -> bool:
    """Whether a value is a list of numbers of microbatches, one for each replica."""
    if not isinstance(given, tuple):
        return False
    counts = cast("tuple[Any, ...]", given)
    return len(counts) > 1 and all(map(_COUNT, counts))


def _is_compiler_options(given: Any) -> bool:
    if given is None:
        return True
    if not isinstance(given, Mapping):
        return False
    options = cast("Mapping[Any, Any]", given)
    kinds = all(
        isinstance(name, str) and name and isinstance(value, (bool, int, float, str))
        for name, value in options.items()
    )
    if kinds:
        check_options(options)
    return kinds


def _is_remat(given: Any) -> bool:
    return given in ("auto", "none") or _layers(given) is not None


def _codec(given: Any) -> bool:
    parsed_codec(given)  # raises an error that says more
    return True


def _read_count(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _read_counts(text: str) -> int | str | tuple[int, ...]:
    parts = text.split("+")
    return _read_count(text) if len(parts) == 1 else tuple(map(int, parts))


def _read_seconds(text: str) -> float | None:
    return None if math.isinf(float(text)) else float(text)


def _is_cut_codecs(given: Any) -> bool:
    if not isinstance(given, str):
        return False  # `PlanOptions` has turned a mapping into a text
    try:
        cut_codecs_text(given)
    except InputError as error:
        raise PlanError(f"cut_codecs={given!r}: {error}") from error
    return True


def _is_gather_codecs(given: Any) -> bool:
    if not isinstance(given, str):
        return False
    if given not in ("none", "auto"):
        try:
            gather_codec(given)
        except InputError as error:
            raise PlanError(f"gather_codecs={given!r}: {error}") from error
    return True


_COUNT = _whole(1)
# Name of an option -> its check. An option without an entry here is not checked.
_CHECKS: Mapping[str, Check] = {
    "pins": _any(None, _has_pins),
    "logical_axis_rules": _any(None, _pairs),
    "axis_names": _any(None, _names()),
    "max_axes": _any(None, lambda x: isinstance(x, int) and not isinstance(x, bool)),
    "seconds": _any(None, lambda x: _number(0.0)(x) and x > 0),
    "planning_seconds": _any(None, lambda x: _number(0.0)(x) and x > 0),
    "split_batch": _any(True, False),
    "compile_check": _any(True, False),
    "compression": _codec,
    "error_budget": _any(None, _number(0.0)),
    "gather_codecs": _is_gather_codecs,
    "cut_codecs": _is_cut_codecs,
    "cut_error_budget": _any(None, _number(0.0)),
    "microbatches": _any(None, "auto", _COUNT, _shares),
    "coupled": _any("refuse", "microbatch"),
    "stages": _any(None, "auto", _COUNT),
    "schedule": _any(None, *(name for name in SCHEDULES if name != NO_SCHEDULE)),
    "remat": _any(None, _is_remat),
    "offload": _any(None, "auto", "none", *OFFLOADS),
    "compiler_options": _is_compiler_options,
    "donate": _any(True, False),
    "programs": _COUNT,
    "least_gain": _number(0.0),
    "telemetry_every": _COUNT,
    "last_batch": _any("run", "drop", "pad"),
}
# Name of an option -> a function that turns the words of a command line into the value.
# The function raises ``ValueError`` if the words are no value of the option.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "pins": lambda words: parse_pins(words) or None,
    "axis_names": lambda text: tuple(x.strip() for x in text.split(",")),
    "max_axes": int,
    "seconds": _read_seconds,
    "planning_seconds": _read_seconds,
    "split_batch": bool,
    "compile_check": bool,
    "error_budget": float,
    "cut_error_budget": float,
    "layouts": lambda text: as_plan(text, "layouts"),
    "microbatches": _read_counts,
    "stages": _read_count,
    "compiler_options": read_compiler_options,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options for planning and running a step; `OPTIONS` has their texts.

    Four more fields are no options of users; the way in which the step is run sets
    them. ``spares`` is the part of the state that devices hold in addition to the state
    in use. ``one_stage`` is the reason why pipelines are not tried without the user
    asking for them; '' means that pipelines are tried. ``may_idle`` says whether
    devices that do not divide the batch may stay idle. ``may_pad`` says whether the
    rows of the batch may be padded.

    Raises:
      PlanError: an option does not accept its value, or two values contradict each
        other.
    """

    pins: Pins | None = OPTIONS["pins"].default
    logical_axis_rules: LogicalRules | None = OPTIONS["logical_axis_rules"].default
    axis_names: Sequence[str] | None = OPTIONS["axis_names"].default
    max_axes: int | None = OPTIONS["max_axes"].default
    seconds: float | None = OPTIONS["seconds"].default
    planning_seconds: float | None = OPTIONS["planning_seconds"].default
    split_batch: bool = OPTIONS["split_batch"].default
    compile_check: bool = OPTIONS["compile_check"].default
    compression: str = OPTIONS["compression"].default
    error_budget: float | None = OPTIONS["error_budget"].default
    gather_codecs: str = OPTIONS["gather_codecs"].default
    cut_codecs: str | Mapping[str, str] = OPTIONS["cut_codecs"].default
    cut_error_budget: float | None = OPTIONS["cut_error_budget"].default
    layouts: Plan | None = OPTIONS["layouts"].default
    microbatches: int | str | Sequence[int] | None = OPTIONS["microbatches"].default
    coupled: str = OPTIONS["coupled"].default
    stages: int | str | None = OPTIONS["stages"].default
    schedule: str | None = OPTIONS["schedule"].default
    remat: int | str | None = OPTIONS["remat"].default
    offload: str | None = OPTIONS["offload"].default
    compiler_options: CompilerOptions | None = OPTIONS["compiler_options"].default
    donate: bool = OPTIONS["donate"].default
    programs: int = OPTIONS["programs"].default
    fallback: str | Sequence[str] = OPTIONS["fallback"].default
    least_gain: float = OPTIONS["least_gain"].default
    telemetry_every: int = OPTIONS["telemetry_every"].default
    last_batch: str = OPTIONS["last_batch"].default
    cache: str | os.PathLike[str] | None = OPTIONS["cache"].default
    static_argnames: Sequence[str] = OPTIONS["static_argnames"].default
    batch_argnames: BatchNames = OPTIONS["batch_argnames"].default
    frozen_argnames: str | Sequence[str] = OPTIONS["frozen_argnames"].default
    whole_argnames: str | Sequence[str] = OPTIONS["whole_argnames"].default
    spares: Spares = spares.NONE
    one_stage: str = ""
    may_idle: bool = True
    may_pad: bool = True

    def __post_init__(self) -> None:
        """Checks each option, then combinations of options."""
        if isinstance(self.microbatches, Sequence):
            counts = self.microbatches
            counts = counts if isinstance(counts, str) else tuple(counts)
            object.__setattr__(self, "microbatches", counts)
        if isinstance(self.cut_codecs, Mapping):
            try:
                text = cut_codecs_text(self.cut_codecs)
            except InputError as error:
                raise PlanError(f"cut_codecs={self.cut_codecs!r}: {error}") from error
            object.__setattr__(self, "cut_codecs", text)
        if isinstance(self.remat, str) and self.remat.isdecimal():
            object.__setattr__(self, "remat", int(self.remat))
        if self.layouts is not None:
            object.__setattr__(self, "layouts", as_plan(self.layouts, "layouts"))
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if not _valid(name, value):
                raise _refusal(f"{name}={_short(value)}", option)
        _check_together(self)

    @property
    def untried_options(self) -> tuple[str, ...]:
        """Options not in use that would lower the memory for activations, as text."""
        off = {
            "remat='auto'": self.remat in (None, 0, "none"),
            "microbatches='auto'": self.microbatches in (None, 1),
            "stages='auto'": self.stages in (None, 1),
            "offload='auto'": self.offload in (None, "none"),
        }
        return tuple(text for text, is_off in off.items() if is_off)

    @property
    def count(self) -> int:
        """The number of microbatches that the user requested; 1 by default."""
        asked = self.microbatches
        if isinstance(asked, int):
            return asked
        return 1 if asked is None or isinstance(asked, str) else sum(asked)


def _valid(name: str, value: Any) -> bool:
    return name not in _CHECKS or _CHECKS[name](value)


def _check_together(asked: PlanOptions) -> None:
    """Raises `PlanError` for options that contradict each other."""
    stages, remat = asked.stages, asked.remat
    wrong = ""
    chooses = "auto" in (asked.compression, asked.gather_codecs)
    if asked.error_budget is not None and not chooses:
        wrong = (
            f"error_budget={asked.error_budget!r} bounds what compression='auto' and "
            "gather_codecs='auto' choose; leave it out with "
            f"compression={asked.compression!r}."
        )
    elif asked.cut_error_budget is not None and asked.cut_codecs != "auto":
        wrong = (
            f"cut_error_budget={asked.cut_error_budget!r} bounds what "
            "cut_codecs='auto' chooses; leave it out with "
            f"cut_codecs={asked.cut_codecs!r}."
        )
    elif isinstance(asked.microbatches, tuple) and stages not in (None, 1):
        wrong = (
            f"microbatches={list(asked.microbatches)} are those of replicas, and "
            f"stages={stages!r}: give one number, or leave stages out."
        )
    elif asked.schedule is not None and stages is None and _is_of_one_stage(asked):
        wrong = (
            f"schedule={asked.schedule!r} is for a pipeline, and "
            f"{_is_of_one_stage(asked)}. Leave one of the two out."
        )
    elif asked.schedule is not None and stages == 1:
        wrong = (
            f"schedule={asked.schedule!r} is for a pipeline, and stages=1. Leave one "
            "of the two out."
        )
    elif asked.cut_codecs not in ("none", "auto") and stages == 1:
        wrong = (
            f"cut_codecs={asked.cut_codecs!r} encodes what pipeline stages send each "
            "other, and there is one stage. Ask for stages=2 or more, or leave "
            "cut_codecs out."
        )
    elif _names_gathers(asked) and stages not in (None, 1):
        wrong = (
            f"gather_codecs={asked.gather_codecs!r} is for plans of one stage, and "
            f"stages={stages!r}: stages gather parameters as they are. Leave one of "
            "the two out."
        )
    elif asked.offload in OFFLOADS and stages not in (None, 1):
        wrong = (
            f"offload={asked.offload!r} is for plans of one stage, and "
            f"stages={stages!r}. Leave one of the two out."
        )
    elif remat == "none" and stages not in (None, 1):
        wrong = (
            f"remat='none' drops the step's own jax.checkpoint in plans of one stage, "
            f"and stages={stages!r}. Leave one of the two out."
        )
    if wrong:
        raise PlanError(wrong)


def _is_of_one_stage(asked: PlanOptions) -> str:
    """The user's options because of which a plan has one stage by default, as text.

    The text is empty if there are none.
    """
    if isinstance(asked.microbatches, tuple):
        return f"microbatches={list(asked.microbatches)} are those of replicas"
    if asked.remat not in (None, "auto") and asked.schedule is None:
        return f"remat={asked.remat!r} was given, and stages= was not"
    if _names_gathers(asked) and asked.schedule is None:
        return f"gather_codecs={asked.gather_codecs!r} was given, and stages= was not"
    if asked.offload in OFFLOADS and asked.schedule is None:
        return f"offload={asked.offload!r} was given, and stages= was not"
    return ""


def _names_gathers(asked: PlanOptions) -> bool:
    """Whether the user named a codec of gathers, which only one stage has."""
    return asked.gather_codecs not in ("none", "auto")


# The default options.
DEFAULTS = PlanOptions()


def decide_open(asked: PlanOptions) -> PlanOptions:
    """Sets ``auto`` for options that neither the user nor another option decides.

    >>> found = decide_open(PlanOptions(remat=4))
    >>> found.stages, found.microbatches, found.one_stage
    (1, 'auto', 'remat=4 was given, and stages= was not')
    """
    why = ""
    if asked.stages is None and asked.schedule is None:
        why = _is_of_one_stage(asked) or asked.one_stage
    stages = asked.stages or (1 if why else "auto")
    several = isinstance(stages, int) and stages > 1
    return dataclasses.replace(
        asked,
        stages=stages,
        microbatches="auto" if asked.microbatches is None else asked.microbatches,
        remat="auto" if asked.remat is None and not several else asked.remat,
        offload=asked.offload or ("none" if several else "auto"),
        one_stage=why,
    )


def as_written(asked: PlanOptions) -> PlanOptions:
    """Sets one stage, one microbatch, no rematerialisation and no offloading where the
    user set none.

    The planner then rewrites the step only if the user requested it, so that the same
    program is planned for several batch sizes.
    """
    return dataclasses.replace(
        asked,
        stages=1 if asked.stages is None else asked.stages,
        microbatches=1 if asked.microbatches is None else asked.microbatches,
        remat=0 if asked.remat is None else asked.remat,
        offload=asked.offload or "none",
    )


def with_compiler_options(plan: Plan, asked: PlanOptions, model: Plan | None) -> Plan:
    """Records the compiler options of a plan: the user's, or those of another plan.

    Args:
      plan: a plan.
      asked: the options of planning.
      model: the plan whose compiler options are taken if the user gave none; None: no
        such plan.
    """
    given = asked.compiler_options
    if given is None:
        given = {} if model is None else model.compiler_options
    return msgspec.structs.replace(plan, compiler_options=dict(given))


def of_one_stage(asked: PlanOptions, **changes: Any) -> PlanOptions:
    """Sets one stage, without the options of stage cuts, which one stage does not have.

    Args:
      asked: the options.
      **changes: other options to set.
    """
    return dataclasses.replace(
        asked, stages=1, cut_codecs="none", cut_error_budget=None, **changes
    )


def read_options(given: Mapping[str, Any]) -> PlanOptions:
    """Parses the options of a command line.

    Args:
      given: name of an option -> its word or words; None: the option was not given.

    Raises:
      PlanError: an option does not accept a word; the error names the flag.
    """
    values: dict[str, Any] = {}
    for name, word in given.items():
        if word in (None, []):
            continue
        option = OPTIONS[name]
        try:
            value = _READERS.get(name, str)(word)
        except ValueError as error:
            if isinstance(error, PlanError):
                raise
            raise _refused_word(option, word) from error
        if not _valid(name, value):
            raise _refused_word(option, word)
        values[name] = value
    return PlanOptions(**values)


def changed_options(asked: PlanOptions, group: str = PLANNING) -> dict[str, Any]:
    """Returns the options of a group that differ from their defaults, by name."""
    return {
        name: getattr(asked, name)
        for name, option in OPTIONS.items()
        if option.group == group and getattr(asked, name) != getattr(DEFAULTS, name)
    }


def with_logical_pins(options: PlanOptions, call: StepCall) -> PlanOptions:
    """Turns Flax's rules for logical axes into pins of a call's arguments.

    A pin from the user takes precedence over a rule.
    """
    named = logical_pins(call, options.logical_axis_rules or ())
    return dataclasses.replace(
        options, pins={**named, **(options.pins or {})}, logical_axis_rules=None
    )


def layers_asked(remat: Any) -> tuple[int | None, str]:
    """Parses how many layers are rematerialised, and which of their activations are
    kept.

    >>> layers_asked("4:dots")
    (4, 'dots')
    >>> layers_asked("all:names=attn_out,mlp_in")
    (None, 'names=attn_out,mlp_in')

    Args:
      remat: a number or ``all``, optionally followed by a level.

    Returns:
      The number of layers (None: all) and the level.
    """
    found = _layers(remat)
    assert found is not None, remat
    return found


def _layers(remat: Any) -> tuple[int | None, str] | None:
    """As `layers_asked`; None if the value has none of these forms."""
    text = str(remat) if _whole(0)(remat) or isinstance(remat, str) else ""
    layers, _, level = text.partition(":")
    if is_level(text):
        layers, level = "all", text
    known = layers == "all" or layers.isdecimal()
    if not known or not is_level(level or FULL) or text.endswith(":"):
        return None
    return (None if layers == "all" else int(layers)), level or FULL


def as_cluster(given: Cluster | str) -> Cluster:
    """Returns a cluster, or the one that a text such as ``2x4:h100`` describes.

    ``local`` means the devices of this process.

    Raises:
      ClusterError: the text describes no cluster, or the value is neither a cluster nor
        a text.
    """
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ClusterError(
            f"cluster={given!r}: expected an autopar.Cluster or its text, such as "
            "'2x4:h100', 'local', or the path of a TOML file."
        )
    return Cluster.local() if given == "local" else Cluster.parse(given)


def as_plan(given: Plan | str | os.PathLike[str], option: str = "plan") -> Plan:
    """Returns a plan, or the one in a JSON file.

    Args:
      given: a plan, or the path of a file that `autopar.Plan.save` wrote.
      option: name of the argument in errors.

    Raises:
      PlanError: the file is missing or holds no plan, or the value is neither a plan
        nor a path.
    """
    if isinstance(given, Plan):
        return given
    if not isinstance(given, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"{option}={given!r}: expected an autopar.Plan, or the path of its JSON "
            "file, such as 'plan.json'."
        )
    return Plan.load(os.fspath(given))


def _refusal(said: str, option: Option) -> PlanError:
    return PlanError(f"{said}: expected {option.expected}.")


def _refused_word(option: Option, word: str | Sequence[str]) -> PlanError:
    given = word if isinstance(word, str) else " ".join(word)
    # Without quotes around words; an apostrophe within a word stays.
    words = option.words or re.sub(r"(?<!\w)'([^']*)'", r"\1", option.expected)
    return PlanError(f"{option.flag} {given}: expected {words}.")


def _short(value: Any) -> str:
    text = repr(list(cast("Any", value)) if isinstance(value, tuple) else value)
    return text if len(text) < 60 else f"{text[:57]}..."
