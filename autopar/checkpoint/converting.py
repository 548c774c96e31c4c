"""Turns checkpoints into what other libraries read, and back."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Mapping

import jax
import msgspec

from autopar.checkpoint import atoms, folders, host, manifest, names, safetensors_files
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.saving import Save
from autopar.errors import CheckpointError

FORMATS = ("safetensors", "atoms", "checkpoint")


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    to: str,
    *,
    step: int | None = None,
    like: pathlib.Path | None = None,
    called: Mapping[str, str] | None = None,
    position: int | None = None,
) -> list[str]:
    """Converts a checkpoint.

    Args:
      source: a checkpoint, a directory of them, or, ``to="checkpoint"``, of atoms.
      target: what is written; it must not be there yet.
      to: ``safetensors`` (parameters), ``atoms`` (of DeepSpeed's universal
        checkpoint) or ``checkpoint``.
      step: which checkpoint of a directory; None: the last.
      like: a checkpoint of the model, for atoms: all but parameters, moments and
        numbers of steps are taken from it.
      called: name of a parameter -> its name among the atoms, where they differ.
      position: samples consumed by the steps of the atoms; None: as many a step as in
        ``like``.

    Returns:
      The names of the parameters that were written.

    Raises:
      CheckpointError: an argument is wrong, or something cannot be read or written.
    """
    if to not in FORMATS:
        raise CheckpointError(f"to='{to}': expected one of {', '.join(FORMATS)}.")
    if to == "checkpoint":
        return _imported(source, target, like, called, position)
    if target.exists():
        raise CheckpointError(f"{target}: is there already; say another place.")
    folder = names.find(source, step)
    held = manifest.read(folder)
    write = safetensors_files.export if to == "safetensors" else atoms.export
    return write(folder, held, target)


def _imported(
    source: pathlib.Path,
    target: pathlib.Path,
    like: pathlib.Path | None,
    called: Mapping[str, str] | None,
    position: int | None,
) -> list[str]:
    """Writes a checkpoint of atoms, in a directory of checkpoints."""
    if like is None:
        raise CheckpointError(
            "converting atoms needs a checkpoint of the model: give it with --like. It "
            "says what the state holds besides parameters and moments."
        )
    folder = names.find(like)
    held = manifest.read(folder)
    new, step = atoms.read(source, folder, held, called)
    state = {
        path: jax.numpy.asarray(new[path])
        if path in new
        else host.read(folder, held, path)
        for path in held.state
    }
    plan = names.plan_of(folder, held)
    made = _with_step(held, step, position)
    place = target / folders.folder_name(step, time.time_ns())
    folders.begin(place)
    save = Save(folder=place, manifest=made, plan=plan, arrays=state)
    save.write(threading.Event())
    return [one.name for one in names.parameters(folder, held)]


def _with_step(held: Manifest, step: int, position: int | None) -> Manifest:
    """The manifest of another step; what codecs kept belongs to the old one."""
    if position is None:
        per_step = held.position / held.step if held.step else 0
        position = held.position if step == held.step else round(step * per_step)
    return msgspec.structs.replace(
        held,
        step=step,
        position=position,
        created=time.time(),
        codecs={},
        codec_tree=None,
    )
