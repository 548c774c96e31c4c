"""How the state of each kind of train step is taken apart for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from autopar.runtime import creation
from autopar.runtime.local.state import LocalState
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.local.whole import Reading, WholeState, from_other_replicas
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.planned import PlannedStep
from autopar.runtime.state_mover import name_arrays
from autopar_errors import check_type

# The shape, dtype and sharding of each array by path, and a function that makes the
# state of arrays in this order.
Wanted = tuple[dict[str, jax.ShapeDtypeStruct], Callable[[list[Any]], Any]]
TrainStep = ParallelStep[..., Any] | LocalSteps


class Saved(Protocol):
    """Takes states of one train step apart into arrays by path."""

    def arrays(self, state: Any) -> dict[str, Any]:
        """The arrays of a state by path.

        Raises:
          CheckpointError, PlanError: the state does not belong to the step.
        """
        ...

    def beside(self) -> tuple[Any, Any]:
        """The codecs' state and the averages of the noise scale, which the step holds
        itself; None where it holds none.
        """
        ...

    def hold(self, codecs: Any, noise: Any) -> None:
        """Gives the step what `beside` returned."""

    def mesh(self) -> Mesh | None:
        """The mesh on which the values of `beside` are restored; None: each process
        puts them on devices of its own.
        """
        ...

    def read(
        self,
        wanted: dict[str, jax.ShapeDtypeStruct],
        saved: Mapping[str, Sequence[int]],
    ) -> Reading:
        """What to read of a checkpoint.

        Args:
          wanted: the arrays of the state.
          saved: path -> shape of each array of the checkpoint.
        """
        ...

    def like(self, state: Any) -> Wanted:
        """What to restore into an existing state."""
        ...

    def created(
        self,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        batch: Any,
        others: Sequence[Any] | Mapping[str, Any] | None,
    ) -> Wanted:
        """What to restore into the state of a function, which is only traced.

        The arguments are those of `Checkpoints.restore`.
        """
        ...


def saved(train_step: TrainStep) -> Saved:
    """Returns what takes states of a train step apart."""
    if isinstance(train_step, LocalSteps):
        return _OfReplicas(train_step)
    return _OfPlan(train_step)


class _OfPlan:
    """The state of a planned step, in the layouts of its plan."""

    def __init__(self, train_step: ParallelStep[..., Any]) -> None:
        self._step = train_step

    def arrays(self, state: Any) -> dict[str, Any]:
        self._step.finish_comparison()
        analysis = self._step.running.planned.analysis
        return name_arrays(self._step.__name__, analysis, state)

    def beside(self) -> tuple[Any, Any]:
        return self._step.compression_state, self._step.noise_state

    def hold(self, codecs: Any, noise: Any) -> None:
        self._step.hold_compression_state(codecs)
        if noise is not None:
            self._step.noise_state = noise

    def mesh(self) -> Mesh | None:
        mesh, *others = self._step.running.planned.meshes
        if others and self._step.world.process_count > 1:
            return None  # the devices of one stage may all be of other processes
        return mesh

    def read(
        self,
        wanted: dict[str, jax.ShapeDtypeStruct],
        saved: Mapping[str, Sequence[int]],
    ) -> Reading:
        del saved
        return Reading(wanted)

    def like(self, state: Any) -> Wanted:
        leaves, _ = creation.flat_state(state)
        structs = _structs(self._step.running.planned, leaves)
        return structs, lambda new: creation.replace_leaves(state, new)

    def created(
        self,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        batch: Any,
        others: Sequence[Any] | Mapping[str, Any] | None,
    ) -> Wanted:
        shapes = creation.state_shapes(create_state, args)
        rest = creation.arguments_after(batch, others)
        if rest is not None:
            self._step.prepare(*shapes.arguments(), *rest[0], **rest[1])
        return _structs(self._step.running.planned, shapes.structs), shapes.state


class _OfReplicas:
    """The states of all replicas of local steps, which depend on no plan."""

    def __init__(self, train_step: LocalSteps) -> None:
        self._step = train_step

    def arrays(self, state: Any) -> dict[str, Any]:
        check_type("save", state, LocalState, "a LocalState")
        return WholeState(self._step, state).arrays(state)

    def beside(self) -> tuple[Any, Any]:
        return None, None

    def hold(self, codecs: Any, noise: Any) -> None:
        del codecs, noise

    def mesh(self) -> Mesh | None:
        return None

    def read(
        self,
        wanted: dict[str, jax.ShapeDtypeStruct],
        saved: Mapping[str, Sequence[int]],
    ) -> Reading:
        return from_other_replicas(self._step, wanted, saved)

    def like(self, state: Any) -> Wanted:
        check_type("restore_into", state, LocalState, "a LocalState")
        whole = WholeState(self._step, state)
        structs = whole.structs()

        def made(new: list[Any]) -> LocalState:
            return whole.state(dict(zip(structs, new, strict=True)))

        return structs, made

    def created(
        self,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        batch: Any,
        others: Sequence[Any] | Mapping[str, Any] | None,
    ) -> Wanted:
        made = self._step.describe(create_state, *args, batch=batch, others=others)
        return self.like(made)


def _structs(running: PlannedStep, leaves: Sequence[Any]) -> dict[str, Any]:
    """Path -> `jax.ShapeDtypeStruct` of each array of a state, with the plan's
    sharding.
    """
    graph = running.analysis.graph
    paths = [given.path for given in graph.inputs[: len(leaves)]]
    return {
        path: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.typeof(x).dtype, sharding=s)
        for path, x, s in zip(paths, leaves, running.in_shardings, strict=False)
    }
