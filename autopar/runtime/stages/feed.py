"""Passes the flat arguments of a step to a pipeline, and returns its flat results."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime import placement
from autopar.runtime.gradients.state_restorer import Carried, kept_or_restored
from autopar.runtime.gradients.sums import State
from autopar.runtime.noise.staged import Place, StagedNoise
from autopar.runtime.stages.pipeline import StagePipeline
from autopar.runtime.stages.run import Ran, partial_gradients, run_step
from autopar.runtime.stages.running_sums import CodecStep
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep
from autopar_passes.microbatches.facts import take_microbatch
from autopar_passes.program.equations import Program, Scalar, evaluate, walk
from autopar_passes.stages.cut import Phase


class Feed:
    """A step of several stages, as a function of its flat arguments."""

    def __init__(
        self,
        analysis: Analysis,
        cut: CutStep,
        pipeline: StagePipeline,
        noise: StagedNoise | None = None,
    ) -> None:
        """Computes the stage and the sharding of each argument.

        Args:
          analysis: the analysis of the step on the whole batch.
          cut: the step cut into stages.
          pipeline: the tasks on their devices.
          noise: the noise measurement; None: the noise is not measured.
        """
        self.noise, self.analysis = noise, analysis
        self.found = cut.found
        self.program: Program = cut.cut.program
        self.pipeline = pipeline
        self.constants = self.program.constant_arrays
        arguments = self.program.body.inputs
        self.values = arguments[: len(analysis.graph.inputs)]
        self.owners = pipeline.cut.owners
        shapes = [analysis.graph.values[i.value].shape for i in analysis.graph.inputs]
        self.in_shardings = [
            self._lies(k, value, shapes[k]) for k, value in enumerate(self.values)
        ]
        # Stage -> positions of the flat arguments that it splits into microbatches.
        self.dealt: dict[int, list[int]] = defaultdict(list)
        for k in self.found.batch:
            self.dealt[self.owners[arguments[k]]].append(k)
        self.deal = {s: self._deal_code(s, ks) for s, ks in self.dealt.items()}
        self.state = set(analysis.carried_arguments.values())
        self.numbers = self._numbers(arguments)
        self._late: dict[int, Any] = {}
        self.ahead = None if self.found.ahead is None else self._ahead_code()

    def _lies(self, k: int, value: int, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an argument.

        Rows of the batch are sharded like the rows of a microbatch.
        """
        stage = self.pipeline.stages[self.owners[value]]
        where = stage.sharding(value)
        if k not in self.found.batch:
            return where
        spec = [*where.spec, *(None,) * (len(shape) - len(where.spec))]
        for dim, names in enumerate(spec):
            if names and shape[dim] % _size(stage.mesh, names):
                spec[dim] = None
        return NamedSharding(stage.mesh, PartitionSpec(*spec))

    def _deal_code(self, stage: int, positions: Sequence[int]) -> Any:
        """A jitted function that splits arrays of the batch into microbatches."""
        where = self.pipeline.stages[stage]
        count = self.found.microbatches
        arguments = self.program.body.inputs
        shardings = [where.sharding(arguments[k]) for k in positions]

        def deal(*arrays: Any) -> list[list[Any]]:
            return [
                [
                    take_microbatch(x, self.found.batch[k], count, np.int32(m))
                    for k, x in zip(positions, arrays, strict=True)
                ]
                for m in range(count)
            ]

        return jax.jit(deal, out_shardings=[shardings] * count)

    def _numbers(self, arguments: Sequence[int]) -> list[dict[int, Any]]:
        """Returns the input with the microbatch's number, for each microbatch."""
        count, place = self.found.microbatches, self.found.number
        if place is None:
            return [{} for _ in range(count)]
        value = arguments[place]
        owner = self.owners[value]
        if not self.pipeline.here(owner):
            return [{value: None} for _ in range(count)]
        where = self.pipeline.stages[owner].sharding(value)
        return [{value: placement.place(np.int32(m), where)} for m in range(count)]

    @functools.cached_property
    def read_late(self) -> frozenset[int]:
        """Positions of the arguments of the batch that updates read."""
        updates = (
            t for k, t in self.pipeline.cut.tasks.items() if k.phase is Phase.UPDATE
        )
        read = {v for task in updates for v, _ in task.inputs}
        own = range(len(self.values))
        return frozenset(
            k for k in self.found.batch if k in own and self.values[k] in read
        )

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """Positions of the arguments that the program before all microbatches reads."""
        assert self.found.ahead is not None
        body = self.found.ahead.body
        atoms = [*(a for eqn in walk(body) for a in eqn.inputs), *body.outputs]
        read = {a for a in atoms if isinstance(a, int)}
        arguments = body.inputs[: len(self.values)]
        return frozenset(k for k, value in enumerate(arguments) if value in read)

    def _ahead_code(self) -> Any:
        """A jitted function that computes inputs which depend on the whole batch."""
        ahead = self.found.ahead
        assert ahead is not None
        return jax.jit(functools.partial(evaluate, ahead))

    def __call__(self, *arguments: Any) -> Any:
        """Runs one step.

        The codecs' state is an argument after the flat arguments, and the state of the
        noise measurement is the last argument. The results are the flat results, then
        the state of codecs, telemetry and levels, then the state of the noise
        (`autopar.runtime.planned.PlannedStep.function`).
        """
        flat = arguments[: len(self.values)]
        behind = list(arguments[len(self.values) :])
        state = behind.pop(0) if self.pipeline.codecs is not None else None
        noise, due = self.noise, None
        if noise is not None and noise.sent and noise.spec.every > 1:
            due = noise.due(behind[0]["step"])
        made, ran = self._step(flat, state, due)
        beside: list[Any] = []
        if ran.codecs is not None:
            self._restore(ran.codecs, flat, made)
            sent = ran.codecs.finish()
            beside = [sent.state, sent.telemetry, sent.levels]
        if noise is not None:
            beside.append(noise.state_after(behind[0], self._gather_noise(noise, ran)))
        return (made, *beside) if beside else made

    def _gather_noise(self, noise: StagedNoise, ran: Ran) -> dict[Place, Any]:
        """Returns the norms of all stages, on devices of this process."""
        links, out = self.pipeline.links, dict[Place, Any]()
        for number, (place, rows) in enumerate(ran.noise.items()):
            found = noise.added_up(place, list(rows)) if rows else None
            if self.pipeline.alone:
                jax.block_until_ready(found)
            if links is not None:
                tag, lies = ("noise", number), noise.lies(place)
                found = links.everywhere(tag, noise.struct(place), lies, found)
            out[place] = found
        return out

    def _restore(self, codecs: CodecStep, flat: Sequence[Any], made: list[Any]) -> None:
        """Restores the state that no task has restored, if a gradient is not finite."""
        for carried in self.pipeline.late:
            owner = self.owners[carried.old]
            if self.pipeline.here(owner):
                old, code = flat[carried.argument], self._restores(carried)
                made[carried.result] = code(
                    old,
                    jax.device_put(made[carried.result], old.sharding),
                    codecs.finite[owner],
                )

    def _restores(self, carried: Carried) -> Any:
        """Returns a jitted function that restores an array of the state.

        Its arguments are the array before the step, the array after the step, and
        whether all gradients are finite.
        """
        if carried.argument not in self._late:
            self._late[carried.argument] = jax.jit(
                functools.partial(kept_or_restored, own=carried.own),
                out_shardings=self.in_shardings[carried.argument],
            )
        return self._late[carried.argument]

    def _step(
        self, flat: Sequence[Any], codecs: State | None, due: Any
    ) -> tuple[list[Any], Ran]:
        """Runs one step on the flat arguments."""
        known, micro = self._deal_inputs(flat)
        ran = run_step(self.pipeline, known, micro, codecs, due)
        ran.told.update(self._passed_arrays(flat))
        out = [self._result(k, ran) for k in range(len(self.program.body.outputs))]
        state = set(self.analysis.carried_arguments.values())
        held = {id(out[k]) for k in state}
        for k, x in enumerate(out):
            # The next step donates its state arguments. So a result must be copied if
            # it is the same array as an array of the state.
            if k not in state and id(x) in held and x.sharding.addressable_devices:
                out[k] = jax.numpy.copy(x)
        return out, ran

    def gradients(self, *flat: Any) -> dict[str, Any]:
        """Name of a gradient -> its partial gradients; see `partial_gradients`."""
        found = partial_gradients(self.pipeline, *self._deal_inputs(flat))
        if self.pipeline.links is not None:
            # Transfers are matched by number of the step, so this call, which is no
            # step, needs a number of its own.
            self.pipeline.links.number += 1
        return found

    def _deal_inputs(
        self, flat: Sequence[Any]
    ) -> tuple[dict[int, Any], list[dict[int, Any]]]:
        """The inputs that all microbatches share, and the inputs of each microbatch."""
        split = set(self.found.batch)
        known = {
            v: x
            for k, (v, x) in enumerate(zip(self.values, flat, strict=True))
            if k not in split
        }
        given_ahead = self._whole_batch_inputs(flat)
        known.update({v: x for k, (v, x) in given_ahead.items() if k not in split})
        # If there is only one microbatch, updates may read the batch itself. With
        # several microbatches, updates read these arguments only if they have no rows.
        known.update({self.values[k]: flat[k] for k in self.read_late})
        micro = [dict(given) for given in self.numbers]
        arguments = self.program.body.inputs
        for stage, positions in self.dealt.items():
            values = [arguments[k] for k in positions]
            if not self.pipeline.here(stage):
                for given in micro:
                    given.update(dict.fromkeys(values))
                continue
            wholes = (
                flat[k] if k < len(flat) else given_ahead[k][1] for k in positions
            )
            parts = self.deal[stage](*wholes)
            for given, arrays in zip(micro, parts, strict=True):
                given.update(zip(values, arrays, strict=True))
        return known, micro

    def _result(self, k: int, ran: Ran) -> Any:
        """Returns a flat result of a step."""
        atom = self.program.body.outputs[k]
        if not isinstance(atom, Scalar) and atom not in self.constants:
            return (ran.state if k in self.state else ran.told)[atom]
        # The next step donates the state, so each step must return a new array for this
        # result.
        known = (
            np.asarray(atom.value, atom.aval.dtype)
            if isinstance(atom, Scalar)
            else self.constants[atom]
        )
        old = next(
            (a for a, new in self.analysis.carried_arguments.items() if new == k), None
        )
        here = (s for n, s in enumerate(self.pipeline.stages) if self.pipeline.here(n))
        where = NamedSharding(next(here).mesh, PartitionSpec())
        return placement.place(known, where if old is None else self.in_shardings[old])

    def _passed_arrays(self, flat: Sequence[Any]) -> dict[int, Any]:
        """Returns the arrays of the batch that the step returns unchanged."""
        out: dict[int, Any] = {}
        for k in sorted(self.found.batch):
            if k >= len(flat):
                break
            value, links = self.values[k], self.pipeline.links
            if value in self.pipeline.outputs:
                whole = flat[k]
                if links is not None:
                    lies = whole.sharding
                    whole = links.everywhere(("passed", k), whole, lies, whole)
                out[value] = whole
        return out

    def clear_cache(self) -> None:
        """Frees the compiled code."""
        self.pipeline.clear_cache()
        for code in (*self.deal.values(), *self._late.values()):
            code.clear_cache()

    def _whole_batch_inputs(self, flat: Sequence[Any]) -> dict[int, tuple[int, Any]]:
        """Flat input that depends on the whole batch -> its value and its array."""
        if self.ahead is None:
            return {}
        made = self.ahead(*self._whole(flat))
        values = [self.program.body.inputs[k] for k in self.found.given]
        arrays = map(self._on_owner, values, made)
        return dict(
            zip(self.found.given, zip(values, arrays, strict=True), strict=True)
        )

    def _on_owner(self, value: int, array: Any) -> Any:
        owner = self.owners[value]
        if not self.pipeline.here(owner):
            return None
        return placement.place(array, self.pipeline.stages[owner].sharding(value))

    def _whole(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments copied to one device; None for an argument not in `read`."""
        links, stages = self.pipeline.links, self.pipeline.stages
        here = next(k for k in range(len(stages)) if self.pipeline.here(k))
        first = stages[here].mesh.devices.flat[0]
        out: list[Any] = [None for _ in flat]
        for k in sorted(self.read):
            if links is None:
                out[k] = jax.device_put(flat[k], first)
            else:
                lies = flat[k].sharding
                out[k] = links.everywhere(("ahead", k), flat[k], lies, flat[k])
        return out


def _size(mesh: Mesh, names: Any) -> int:
    group = (names,) if isinstance(names, str) else names
    return int(np.prod([mesh.shape[n] for n in group]))
