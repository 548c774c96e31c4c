"""Reads and writes atoms of DeepSpeed's universal checkpoints: a folder for each
parameter.

::

    zero/<parameter>/fp32.pt        the weight in float32
    zero/<parameter>/exp_avg.pt     Adam's first moment
    zero/<parameter>/exp_avg_sq.pt  its second moment
    zero/<parameter>/step.pt        number of steps

Each of the first three holds ``{"cat_dim": 0, "param": tensor}`` [1]. Arrays keep their
JAX shape. If a weight is transposed in the PyTorch model, the loader of that model must
transpose it. The other files of a universal checkpoint (``mp_rank_*``) belong to
DeepSpeed. This module neither writes nor reads them.

[1] DeepSpeed, ``deepspeed/checkpoint/ds_to_universal.py``,
``deepspeed/checkpoint/universal_checkpoint.py``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from autopar.checkpoint import folders, restoring, torch_files
from autopar.checkpoint.manifest import Manifest
from autopar.errors import CheckpointError
from autopar_passes.jax_compat import dtype_of

ZERO, WEIGHT, STEP = "zero", "fp32", "step"
_MOST, _MOST_STEPS = 4, 1 << 53


def export(folder: pathlib.Path, held: Manifest, target: pathlib.Path) -> list[str]:
    """Writes the parameters and moments of a checkpoint as atoms.

    Args:
      folder: folder of the checkpoint.
      held: manifest of the checkpoint.
      target: folder in which the folder ``zero`` is created.

    Returns:
      The names of the parameters.

    Raises:
      CheckpointError: the checkpoint is damaged, or the target cannot be written.
    """
    found = folders.parameter_paths(folder, held)
    with folders.telling(target, "written"):
        for one in found:
            place = target / ZERO / one.name
            place.mkdir(parents=True)
            for path, file in _files(one).items():
                array = np.asarray(restoring.read_array(folder, held, path))
                atom = {"cat_dim": 0, "param": array.astype(np.float32)}
                torch_files.save(place / f"{file}.pt", atom)
            torch_files.save(place / f"{STEP}.pt", held.step)
    return [one.name for one in found]


def _files(one: folders.Parameter) -> dict[str, str]:
    """Path of each array of a parameter in the state -> file in the parameter's
    atom.
    """
    pairs = {WEIGHT: one.path, "exp_avg": one.first, "exp_avg_sq": one.second}
    return {path: file for file, path in pairs.items() if path}


def read(
    source: pathlib.Path,
    folder: pathlib.Path,
    held: Manifest,
    called: Mapping[str, str] | None = None,
) -> tuple[dict[str, np.ndarray], int]:
    """Reads atoms, to replace the parameters and moments of a checkpoint of the same
    model.

    Args:
      source: folder that contains the folder ``zero``.
      folder: folder of a checkpoint of the same model.
      held: manifest of that checkpoint.
      called: name of a parameter in the checkpoint -> name of its atom, for names that
        differ.

    Returns:
      A mapping from paths in the state to arrays in the checkpoint's dtypes; and the
      number of steps.

    Raises:
      CheckpointError: an atom is missing or damaged, or has another shape.
    """
    if not (source / ZERO).is_dir():
        raise CheckpointError(f"{source}: no atoms: it has no folder '{ZERO}'.")
    found = folders.parameter_paths(folder, held)
    _check_names(source, [(called or {}).get(x.name, x.name) for x in found])
    out: dict[str, np.ndarray] = {}
    step = held.step
    for one in found:
        place = source / ZERO / (called or {}).get(one.name, one.name)
        for path, file in _files(one).items():
            out[path] = _array(place / f"{file}.pt", held, path)
        if (place / f"{STEP}.pt").is_file():
            step = _step(place / f"{STEP}.pt")
    for path in folders.count_paths(held):
        entry = held.state[path]
        out[path] = np.full(entry.shape, step, dtype_of(entry.dtype))
    return out, step


def _step(file: pathlib.Path) -> int:
    """Reads a number of steps. DeepSpeed writes it as a number or as a tensor."""
    found = torch_files.load(file)
    array = np.asarray(found) if isinstance(found, (int, float, np.ndarray)) else None
    if array is None or array.size != 1 or not 0 <= array.item() < _MOST_STEPS:
        raise CheckpointError(f"{file}: not a number of steps.")
    return int(array.item())


def _check_names(source: pathlib.Path, wanted: list[str]) -> None:
    have = set(_atoms(source))
    if missing := [name for name in wanted if name not in have]:
        others = sorted(have - set(wanted))
        unused = f"; not used: {', '.join(others[:_MOST])}" if others else ""
        raise CheckpointError(
            f"{source}: no atoms of {', '.join(missing[:_MOST])}{unused}. Say which "
            "belong together with --names."
        )


def _atoms(source: pathlib.Path) -> Iterator[str]:
    """Yields the names of the atoms. If a name has slashes, the atom is in nested
    folders.
    """
    zero = source / ZERO
    for file in zero.rglob(f"{WEIGHT}.pt"):
        yield file.parent.relative_to(zero).as_posix()


def _array(file: pathlib.Path, held: Manifest, path: str) -> np.ndarray:
    atom = torch_files.load(file)
    entry = held.state[path]
    array = atom.get("param") if isinstance(atom, Mapping) else atom
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{file}: not an atom: it has no 'param'.")
    if array.shape != entry.shape:
        raise CheckpointError(
            f"{file}: is of shape {list(array.shape)}, and '{path}' of "
            f"{list(entry.shape)}."
        )
    return array.astype(dtype_of(entry.dtype))
