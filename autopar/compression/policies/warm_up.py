"""Warm-up: compresses gradients less in the first steps than later.

Gradients are largest and change fastest in the first steps. So the residuals of a codec
are large then, and outdated when they are sent. 1-bit Adam (arXiv 2102.02888, section
4) trains the first 15 to 20 % of the steps without a codec. Deep Gradient Compression
(arXiv 1712.01887, section 3.3) raises its sparsity over the first epochs.

The warm-up ends with a change to another codec, and then perhaps to another policy.
Residuals and states of codecs are kept at this change, which costs one compilation::

    policy = WarmUp(steps=100, first="dense", codec="sign")

    @autopar.parallelize(cluster=cluster, compression="sign", policy=policy)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.compression.policies.policy import (
    Observation,
    Policy,
    ProbingPolicy,
    canonical_text,
    changed_part,
    check_count,
    managed_gradients,
    restore_state,
)


@dataclasses.dataclass(slots=True)
class WarmUpState:
    """What the policy remembers from one observation to the next.

    Attributes:
      names: the gradients whose codecs the policy changes; empty before the first
        observation.
      over: whether the warm-up has ended.
    """

    names: list[str] = dataclasses.field(default_factory=list[str])
    over: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Uses the codec ``first`` in the first steps, and ``codec`` or ``then`` later.

    The very first step uses the codecs of the plan, because a policy is called only
    after a step.

    Attributes:
      steps: number of steps of the warm-up, from the first step of the training.
      codec: codec after the warm-up, for the gradients that the plan does not send
        dense.
      first: codec of these gradients during the warm-up.
      then: a policy that takes over after the warm-up, when gradients have ``codec``;
        None: ``codec`` stays.
      state: what the policy remembers.
    """

    steps: int
    codec: str
    first: str = "dense"
    then: Policy | None = None
    state: WarmUpState = dataclasses.field(
        default_factory=WarmUpState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        check_count("WarmUp", steps=self.steps)
        object.__setattr__(self, "codec", canonical_text(self.codec))
        object.__setattr__(self, "first", canonical_text(self.first))

    @property
    def every(self) -> int:
        """Number of steps between observations.

        During the warm-up, the policy observes only after its first and its last step.
        """
        if not self.state.over:
            return self.steps if self.state.names else 1
        return self.steps if self.then is None else self.then.every

    @property
    def often(self) -> bool:
        """Whether ``then`` has taken over and often changes parameters of codecs."""
        return self.state.over and getattr(self.then, "often", False)

    @property
    def horizon(self) -> int:
        """Number of steps for which changes are expected to last: the ``horizon`` of
        ``then`` once it has taken over.
        """
        return getattr(self.then, "horizon", 0) if self.state.over else 0

    @property
    def probes(self) -> tuple[str, ...]:
        """The codecs whose errors ``then`` needs; empty before ``then`` takes over."""
        then = self.then
        return (
            then.probes if isinstance(then, ProbingPolicy) and self.state.over else ()
        )

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        state = self.state
        if state.over:
            return None if self.then is None else self.then.observe(seen)
        if not state.names:
            state.names = managed_gradients(seen.gradients)
        state.over = seen.step >= self.steps
        codec = self.codec if state.over else self.first
        return changed_part(dict.fromkeys(state.names, codec), seen.gradients)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, including the state of ``then`` if it has one."""
        return {"warm_up": dataclasses.asdict(self.state), "then": _saved_of(self.then)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores a saved state.

        Raises:
          InputError: the state belongs to another policy.
        """
        restore_state(self.state, values.get("warm_up", {}), "WarmUp")
        load = getattr(self.then, "load_state_dict", None)
        if load is not None:
            load(values["then"])


def _saved_of(policy: Policy | None) -> Any:
    save = getattr(policy, "state_dict", None)
    return None if save is None else save()
