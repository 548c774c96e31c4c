"""Errors of the package in the spelling of the command line.

The planner names its options as Python does, such as ``remat='auto'``; here they become
``--remat auto``, for every message at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from autopar.planner.option_texts import OPTIONS

# Arguments in Python that are options of a command, most of them of ``autopar plan``.
_NAMES = (*OPTIONS, "memory", "to")  # ``to`` of a checkpoint
_ONE = "|".join(_NAMES)
# A name with its value, where it is no part of a cluster's text: "8:cpu,memory=4GB".
_GIVEN = re.compile(
    rf"(?<![\w.,:=\[-])({_ONE})="
    r"('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^()]*\)|\{[^{}]*\}|[\w.]*\w)?"
)
_LEFT_OUT = re.compile(rf"\b([Ll]eave) ({_ONE}) out\b")
_CALL = re.compile(r"autopar\.plan\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
# An option of the command line that was given before has two dashes.
_PIN = re.compile(r"(?<![-\w])pin '([^']*)'")
_CLUSTER = re.compile(r"Cluster\.parse\('([^']*)'\)")

# The options of a command that has all of planning.
ALL = frozenset(option.flag for option in OPTIONS.values() if option.flag)


def spell_options(text: str, options: Collection[str] = ALL) -> str:
    """Returns a message with the arguments that it names as options.

    Args:
      text: the message of an error.
      options: those of the command that failed. Any other is one of ``autopar plan``.

    >>> spell_options("try: remat='auto' or memory=4.2GB", ["--remat", "--memory"])
    'try: --remat auto or --memory 4.2GB'
    """

    def option(name: str, value: str = "") -> str:
        flag = OPTIONS[name].flag if name in OPTIONS else f"--{name}"
        if not flag:
            return f"autopar.parallelize({name}={value or '...'})"
        known = flag in options
        if name == "memory" and value and not known:
            return f"memory={value} in --cluster"
        if name == "split_batch" and value == "False":
            flag, value = "--no-split-batch", ""
        words = [flag, _value(name, value)]
        return " ".join(x for x in (*([] if known else ["autopar plan"]), *words) if x)

    def call(match: re.Match[str]) -> str:
        parts = [x.partition("=") for x in re.split(r", (?=\w+=)", match[1])]
        words = [option(name, value or "...") for name, _, value in parts]
        return " ".join(["autopar plan", *(x.split("plan ")[-1] for x in words)])

    text = _CALL.sub(call, text)
    text = _GIVEN.sub(lambda m: option(m[1], m[2] or ""), text)
    text = _LEFT_OUT.sub(lambda m: f"{m[1]} {option(m[2])} out", text)
    text = _PIN.sub(lambda m: f"{option('pins')} {shlex.quote(m[1])}", text)
    return _CLUSTER.sub(r"--cluster \1", text)


def _value(name: str, value: str) -> str:
    """A value of Python as a word of a shell."""
    if value in ("", "...", "True"):
        return "" if value == "True" else value
    if value.startswith("{"):
        return "PATH=SPEC"
    if value.startswith(("[", "(")):
        parts = [x.strip().strip("'\"") for x in value[1:-1].split(",")]
        return ("+" if name == "microbatches" else ",").join(x for x in parts if x)
    return shlex.quote(value[1:-1]) if value[0] in "'\"" else value
