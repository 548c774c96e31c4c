"""The work of ``autopar checkpoint``."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import msgspec

from autopar.checkpoint import converting, folders, manifest, restoring
from autopar.checkpoint.manifest import Manifest
from autopar.cli.commands.runs import CheckpointOptions, ConvertCommand
from autopar.cli.failures import DIFFERENT
from autopar.cli.output import Result
from autopar.errors import CheckpointError
from autopar.reports.table import bytes_text
from autopar.terminal import columns


def show(asked: CheckpointOptions) -> Result:
    """Lists the checkpoints of a directory, and the arrays of one.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read.
    """
    chosen = folders.find_checkpoint(asked.directory, asked.step)
    whole, begun = _all(asked.directory, chosen)
    held = manifest.read(chosen)
    if asked.as_json:
        return Result.of(
            {
                "checkpoints": [_data(folder) for folder in whole],
                "incomplete": [str(folder) for folder in begun],
                "shown": {"folder": str(chosen), **msgspec.to_builtins(held)},
            }
        )
    tables = [_list(whole), _incomplete(begun), _arrays(chosen, held)]
    return Result("\n\n".join("\n".join(lines) for lines in tables if lines))


def _all(
    directory: pathlib.Path, chosen: pathlib.Path
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Returns the complete and the incomplete checkpoints at a path."""
    if chosen == directory:
        return [chosen], []
    return folders.complete(directory), folders.incomplete(directory)


def _data(folder: pathlib.Path) -> dict[str, Any]:
    try:
        held = manifest.read(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "damaged": str(error)}
    return {
        "folder": str(folder),
        "step": held.step,
        "position": held.position,
        "created": held.created,
        "num_bytes": held.num_bytes,
    }


def _list(whole: list[pathlib.Path]) -> list[str]:
    rows = [("checkpoint", "step", "samples", "arrays", "size", "saved")]
    for folder in whole:
        try:
            held = manifest.read(folder)
        except CheckpointError:
            rows.append((folder.name, "", "", "", "", "its manifest is damaged"))
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.created))
        step, position = str(held.step), str(held.position)
        count, size = str(len(held.arrays)), bytes_text(held.num_bytes)
        rows.append((folder.name, step, position, count, size, saved))
    return columns(rows, right=(1, 2, 3, 4))


def _incomplete(begun: list[pathlib.Path]) -> list[str]:
    return [f"{folder.name}: this save did not end" for folder in begun]


def _arrays(folder: pathlib.Path, held: Manifest) -> list[str]:
    rows = [("array", "dtype and shape", "size", "checksum")]
    rows += [
        (path, entry.text, bytes_text(entry.num_bytes), entry.digest[:16])
        for path, entry in held.arrays.items()
    ]
    title = f"{folder.name}: step function '{held.name}', saved under {held.plan.text}"
    return [title, "", *columns(rows, right=(2,))]


def verify(asked: CheckpointOptions) -> Result:
    """Reads and verifies all checkpoints of a directory, or the checkpoint of one step.

    Raises:
      CheckpointError: there is no checkpoint.
    """
    step = asked.step
    chosen = folders.find_checkpoint(asked.directory, step)
    whole, begun = _all(asked.directory, chosen)
    found = {
        folder: _problems(folder)
        for folder in whole
        if step is None or folder == chosen
    }
    code = DIFFERENT if any(found.values()) else 0
    if asked.as_json:
        data = [{"folder": str(x), "problems": said} for x, said in found.items()]
        started = [str(folder) for folder in begun]
        return Result.of({"checkpoints": data, "incomplete": started}, code)
    lines: list[str] = []
    for folder, said in found.items():
        lines += said or [f"{folder.name}: every array is as it was saved"]
    return Result("\n".join([*lines, *_incomplete(begun)]), code)


def _problems(folder: pathlib.Path) -> list[str]:
    try:
        return restoring.find_problems(folder, manifest.read(folder))
    except CheckpointError as error:
        return [str(error)]


def convert(asked: ConvertCommand) -> Result:
    """Converts a checkpoint; see `autopar.checkpoint.converting.convert`.

    Raises:
      CheckpointError: an argument is wrong, or a file cannot be read or written.
    """
    found = converting.convert(
        asked.directory,
        asked.target,
        asked.to,
        step=asked.step,
        like=asked.like,
        called=None if asked.names is None else _read_names(asked.names),
        position=asked.position,
    )
    if asked.as_json:
        data = {"target": str(asked.target), "format": asked.to, "parameters": found}
        return Result.of(data)
    return Result(f"wrote {len(found)} parameters to {asked.target}")


def _read_names(path: pathlib.Path) -> dict[str, str]:
    """Reads a file that maps names of parameters to names of atoms."""
    try:
        found = json.loads(path.read_text())
        good = all(isinstance(x, str) for x in found.values())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, AttributeError, RecursionError):
        good, found = False, {}
    if not good:
        raise CheckpointError(
            f'{path}: expected a JSON object of names, such as {{"up.kernel": '
            '"layers.0.up.weight"}.'
        )
    return found
