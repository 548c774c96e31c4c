"""Decides when codecs that save time are worth the compilation of their program.

A policy answers with `autopar.compression.policies.policy.Saving` where the codecs in
use lose no more than it allows, and others would take less time. Their program, if it
is not compiled already, has to pay for its compilation::

    saved_s steps + missed_s >= compile_s

with ``saved_s`` the predicted seconds that a step saves, ``steps`` those for which the
change stays, ``compile_s`` what the last compilation took, and ``missed_s`` what steps
would have saved so far by changes that were put off, since the last that was compiled.
So a change that stays wanted is compiled in the end, though nobody knows how long it
stays: the steps before it have then lost no more than its compilation takes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

from autopar.cost.pricer import Pricer
from autopar.planner.stages.placement import stage_pricers
from autopar.plans import Plan
from autopar.reports.gradients import codec_rows
from autopar.units import seconds_text

# Most changes that are remembered.
CHANGES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class CodecChange:
    """A change of codecs that a policy has asked for.

    Attributes:
      step: number of steps done when it was first asked for.
      codecs: by name of the gradient.
      adopted: whether steps use them from then on; else they were put off.
      reason: why, in words.
      saved_s: predicted seconds that a step saves; 0 where nothing is compared.
      steps: for which the change is expected to stay.
      missed_s: predicted seconds that steps before would have saved.
      compile_s: seconds that the last compilation of a program of the step took.
    """

    step: int
    codecs: Mapping[str, str]
    adopted: bool
    reason: str
    saved_s: float = 0.0
    steps: int = 0
    missed_s: float = 0.0
    compile_s: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether what it saves reaches the time that its program takes to compile."""
        expected_s = self.saved_s * self.steps + self.missed_s
        return self.saved_s > 0 and expected_s >= self.compile_s


class Adoption:
    """The changes that a policy has asked for, and what steps miss by those put off."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self._changes: deque[CodecChange] = deque(maxlen=CHANGES)
        self._missed_s = 0.0
        # The change that was put off last, if it is still wanted, and the step up to
        # which it has been counted.
        self._waiting: CodecChange | None = None
        self._counted = 0

    @property
    def changes(self) -> tuple[CodecChange, ...]:
        """The latest changes, the newest last."""
        return tuple(self._changes)

    @property
    def waiting(self) -> Mapping[str, str]:
        """The codecs that were put off and are still wanted."""
        return {} if self._waiting is None else self._waiting.codecs

    def count_missed(self, step: int) -> None:
        """Counts what the steps up to this one have missed."""
        if self._waiting is not None:
            steps = step - self._counted
            self._missed_s += max(0.0, self._waiting.saved_s) * steps
        self._counted = step

    def withdrawn(self) -> None:
        """The policy asks for nothing, or something else was decided."""
        self._waiting = None

    def follow(
        self, codecs: Mapping[str, str], *, compiled: bool, why: str = "asked for"
    ) -> None:
        """Notes codecs that are used from now on without being compared.

        Args:
          codecs: by name of the gradient.
          compiled: whether their program is there.
          why: the reason, in words.
        """
        self._note(CodecChange(self._counted, codecs, adopted=True, reason=why))
        if not compiled:
            self._missed_s = 0.0

    def judge(
        self, codecs: Mapping[str, str], saved_s: float, steps: int, compile_s: float
    ) -> bool:
        """Whether codecs whose program has to be compiled are used from now on.

        Args:
          codecs: by name of the gradient.
          saved_s: predicted seconds that they save in a step.
          steps: for which they are expected to stay.
          compile_s: seconds that their program is expected to take to compile.
        """
        asked = CodecChange(
            step=self._counted,
            codecs=codecs,
            adopted=False,
            reason="",
            saved_s=saved_s,
            steps=steps,
            missed_s=self._missed_s,
            compile_s=compile_s,
        )
        why = "pays for its compilation" if asked.pays else _why_not(asked)
        made = dataclasses.replace(asked, adopted=asked.pays, reason=why)
        self._note(made)
        if made.adopted:
            self._missed_s = 0.0
        return made.adopted

    def _note(self, change: CodecChange) -> None:
        last = self._waiting
        # What is asked for again and put off again is one change.
        if last is not None and not change.adopted and last.codecs == change.codecs:
            self._changes.remove(last)
            change = dataclasses.replace(change, step=last.step)
        self._changes.append(change)
        self._waiting = None if change.adopted else change


def _why_not(asked: CodecChange) -> str:
    if asked.saved_s <= 0:
        return "put off: no step is predicted to be faster"
    return (
        f"put off: saves {seconds_text(asked.saved_s)} in each of {asked.steps} steps, "
        f"{seconds_text(asked.missed_s)} in those before, and compiles for "
        f"{seconds_text(asked.compile_s)}"
    )


def saved_s(before: Plan, after: Plan) -> float:
    """Predicted seconds of a step that other codecs of a plan save.

    Args:
      before: the plan in use.
      after: the same with other codecs.

    Raises:
      PlanError: the plan's mesh is none of its cluster.
    """
    pricers = stage_pricers(before)
    return _codecs_s(before, pricers) - _codecs_s(after, pricers)


def _codecs_s(plan: Plan, pricers: Sequence[Pricer]) -> float:
    """Seconds of a step for encoding, sending and decoding, on the slowest stage."""
    return max(
        sum(row.seconds for row in codec_rows(stage.gradients, pricer))
        for stage, pricer in zip(plan.stages, pricers, strict=True)
    )
