"""Measures the errors of codecs on the gradients of a step without sending gradients.

A probing policy (`autopar.compression.policies.policy.ProbingPolicy`) needs the
measured errors of codecs. Two kinds of programs measure them, in addition to the
program of the step. The first program takes the arguments of the step and returns the
partial gradients. There is one second program for each shape of gradient. It adds the
residual to the partial gradient and encodes the result by every codec. Neither program
depends on the codecs in use, so a change of codecs needs no new compilation of these
programs. The gradients stay sharded on the devices. Only a few numbers per gradient
leave the devices.

Each worker encodes its array without communication, as if all workers had the same
array, because `autopar.compression.synchronise` defines the error of a codec in the
same way. A codec with state starts from a new state, and encodes a few times before its
error is measured. With ``w`` the array that a worker wants to send, and ``C(w)`` the
array that a receiver decodes::

    error = sqrt(sum |w - C(w)|^2 / sum |w|^2)        sums over the workers
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compression.codecs.codec import KEEP_ROUNDINGS, Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import RecordingLinks
from autopar.compression.gradient import Gradient, init_state
from autopar.compression.policies.policy import Choice, MeasuredErrors
from autopar.compression.policies.probe import WARM_UP, round_error
from autopar.compression.synchronise import ERROR, WANTED, synchronise
from autopar.runtime import agreement
from autopar.runtime.gradients.sums import AnySums, GradientSums, Member, State
from autopar.runtime.gradients.synchroniser import sum_within
from autopar.runtime.recent import Recent
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World
from autopar.steps.sums import worth_a_codec
from autopar_passes.layouts import constrain, mesh_sharding, partition_spec
from autopar_passes.sums.stacked import Stacked

Codecs = tuple[tuple[str, Codec], ...]


class _Recorder:
    """A `Synchroniser` that records partial gradients, and sums without a codec."""

    def __init__(self, sums: GradientSums) -> None:
        self.sums = sums
        self.partials: dict[str, Any] = {}

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        return self.sums.together(value)

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        totals: dict[int, Any] = {}
        for value, partial in partials.items():
            member = self.sums.members[value]
            self.partials[member.decision.name] = partial.array
            total = jnp.sum(partial.array, axis=0)
            totals[value] = constrain(total, self.sums.mesh, member.home)
        return totals


def probed_members(sums: GradientSums) -> list[Member]:
    """Returns the gradients that are large enough to be sent by a codec."""
    return [m for m in sums.members.values() if worth_a_codec(m.decision.shape)]


def partial_gradients(
    run: Callable[..., Any], sums: GradientSums
) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """Returns a function that computes the partial gradients of a step, to be compiled.

    Args:
      run: the replay of the step (`autopar_passes.replay.run.replay`).
      sums: the sums of gradients of the step.

    Returns:
      A function and the shardings of its results. The function takes the flat arguments
      of the step and returns name of a gradient -> partial gradients, ``(devices,
      *shape)``.
    """
    names = [m.decision.name for m in probed_members(sums)]

    def gradients(*flat: Any) -> dict[str, Any]:
        recorder = _Recorder(sums)
        run(*flat, synchroniser=recorder)
        return {name: recorder.partials[name] for name in names}

    shardings = {
        m.decision.name: mesh_sharding(sums.mesh, m.stacked)
        for m in probed_members(sums)
    }
    return gradients, shardings


def measure_errors(
    sums: AnySums,
    partials: dict[str, Any],
    state: State,
    texts: Sequence[str],
    world: World,
    programs: ProbePrograms,
    links: Links | None,
) -> dict[str, MeasuredErrors]:
    """Name of a gradient -> the measured errors of codecs.

    The result is empty if a gradient is not finite.

    Args:
      sums: the sums of gradients of the step.
      partials: the partial gradients, from `partial_gradients`; they are donated.
      state: the state of the codecs in use, before the step.
      texts: the codecs to measure, as text.
      world: the processes; every process gets the numbers that process 0 measured.
      programs: holds the compiled programs from one step to the next.
      links: the connections to other processes that run stages; None: all stages run in
        this process.
    """
    codecs = tuple((text, parse_codec(text)) for text in dict.fromkeys(texts))
    programs.keep([part.mesh for part in sums.parts])
    entries: list[tuple[GradientSums, Member, Codecs]] = []
    rows: list[Any] = []
    for part in sums.parts:
        for member in probed_members(part):
            name = member.decision.name
            usable = _usable(member.gradient, codecs)
            partial = partials.pop(name, None)
            if not usable:
                continue
            row = None
            if partial is not None:
                residual = state["gradients"][name]["residual"]
                row = _program_of(part, member, usable, programs)(partial, residual)
            if links is not None:
                struct = jax.ShapeDtypeStruct((1 + len(usable),), jnp.float32)
                lies = NamedSharding(part.mesh, PartitionSpec())
                row = links.everywhere(("tried", name), struct, lies, row)
            rows.append(row)
            entries.append((part, member, usable))
    if not entries:
        return {}
    found = agreement.shared_array(world, np.concatenate([*map(np.asarray, rows)]))
    if not np.isfinite(found).all():
        return {}
    ends = np.cumsum([1 + len(usable) for _, _, usable in entries])[:-1]
    return {
        entry[1].decision.name: _measured_errors(*entry, row)
        for entry, row in zip(entries, np.split(found, ends), strict=True)
    }


def _usable(gradient: Gradient, codecs: Codecs) -> Codecs:
    return tuple(
        (text, codec)
        for text, codec in codecs
        if not codec.check(gradient.shape, scatter=gradient.scatter)
    )


def _measured_errors(
    sums: GradientSums, member: Member, usable: Codecs, row: np.ndarray
) -> MeasuredErrors:
    """Returns the measured errors of codecs for one gradient, from its row of sums."""
    gradient, workers = member.gradient, member.summation.workers
    wanted, *errors = (float(x) for x in row)
    elements = math.prod(member.decision.shape)
    # The sums in ``row`` are over all devices. The mean square of all elements that
    # devices encode, times the number of the gradient's elements, is the squared norm
    # for one worker. This holds whether other devices have copies or other shards.
    devices = math.prod(sums.mesh.shape.values())
    norm = math.sqrt(wanted * elements / (gradient.size * devices))
    choices: list[Choice] = []
    for (text, codec), error in zip(usable, errors, strict=True):
        found = codec.messages(gradient.shape, workers, scatter=gradient.scatter)
        nbytes = sum(message.sent for message in found)
        relative = round_error(math.sqrt(error / wanted)) if wanted else 0.0
        choices.append(Choice(text, relative, nbytes, len(found)))
    return MeasuredErrors(elements, gradient.size, norm, tuple(choices))


def _program_of(
    sums: GradientSums, member: Member, usable: Codecs, programs: ProbePrograms
) -> Callable[[Any, Any], Any]:
    """The program for one gradient; gradients with equal options share a program.

    Names and seeds do not count as options, so a random codec draws the same numbers
    for all gradients of a program.
    """
    feedback = dataclasses.replace(member.gradient.feedback, average_every=0)
    plain = dataclasses.replace(member.gradient, name="", seed=0, feedback=feedback)
    candidates = tuple(dataclasses.replace(plain, codec=codec) for _, codec in usable)
    return programs.get(
        sums.mesh,
        partition_spec(sums.mesh, member.stacked),
        partition_spec(sums.mesh, member.residual[1]),
        member.summation,
        candidates,
    )


# Largest number of programs that are kept: one for each shape of gradient and set of
# codecs.
PROGRAMS = 256


class ProbePrograms:
    """The programs that measure errors of codecs, by the options of a gradient."""

    def __init__(self) -> None:
        """Creates the object without programs."""
        self._programs: Recent[Hashable, Any] = Recent(PROGRAMS, _release)
        self._meshes: list[Any] = []

    def keep(self, meshes: Sequence[Any]) -> None:
        """Drops all programs if the meshes differ from those of the last call."""
        if list(meshes) != self._meshes:
            self._programs.discard(lambda _: True)
            self._meshes = list(meshes)

    def get(
        self,
        mesh: Any,
        stacked: PartitionSpec,
        kept: PartitionSpec,
        summation: Any,
        candidates: tuple[Gradient, ...],
    ) -> Callable[[Any, Any], Any]:
        """Returns the program for these options, and makes it if needed."""
        key = (mesh, stacked, kept, summation, candidates)
        found = self._programs.get(key)
        if found is None:
            made = _program(mesh, stacked, kept, summation, candidates)
            found = self._programs.put(key, made)
        return found


def _release(program: Any) -> None:
    program.clear_cache()


def _program(
    mesh: Any,
    stacked: PartitionSpec,
    kept: PartitionSpec,
    summation: Any,
    candidates: tuple[Gradient, ...],
) -> Callable[[Any, Any], Any]:
    """Makes a program that returns squared norms, summed over all devices.

    The first number is the squared norm of the array to send, the others are the
    squared norms of the errors of the codecs.
    """
    names = mesh.axis_names
    fast = tuple(names[a] for a in summation.within)

    def sums(partial: Any, residual: Any) -> Any:
        (own,) = sum_within([summation], [partial[0]], fast)
        shape = candidates[0].shape
        residual = jax.tree.map(lambda x: x[0].reshape(shape), residual)
        worker = jax.lax.axis_index(tuple(names[a] for a in summation.axes))
        rows = [_row(g, own, residual, summation.workers, worker) for g in candidates]
        found = jnp.stack([rows[0][WANTED], *(row[ERROR] for row in rows)])
        return jax.lax.psum(found, names)

    residual = kept if candidates[0].feedback.active else ()
    return jax.jit(
        jax.shard_map(
            sums,
            mesh=mesh,
            in_specs=(stacked, residual),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
        compiler_options=KEEP_ROUNDINGS,
    )


def _row(
    gradient: Gradient, partial: Any, residual: Any, workers: int, worker: Any
) -> jax.Array:
    """Encodes a worker's gradient; returns its telemetry row, as `synchronise` does."""
    links = RecordingLinks(workers)

    def encode(step: Any, state: Any) -> tuple[Any, jax.Array]:
        whole = [{"residual": residual, "codec": state}]
        _, after, sums = synchronise([gradient], [partial], whole, links, worker, step)
        return after[0]["codec"], sums[0]

    state = init_state(gradient, workers)["codec"]
    if not jax.tree.leaves(state):
        return encode(jnp.int32(0), state)[1]
    state = jax.lax.fori_loop(0, WARM_UP, lambda k, s: encode(k, s)[0], state)
    return encode(jnp.int32(WARM_UP), state)[1]
