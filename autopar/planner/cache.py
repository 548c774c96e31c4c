"""Keeps plans on disk, by what they were made of."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.record import split_as
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.version import __version__


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans.

    A plan is found again for the same step and shapes (its fingerprint), cluster,
    options and version of autopar.

    Attributes:
      folder: where the plans are; made when the first is kept.
    """

    folder: Path

    def plan(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: PlanOptions,
        make: Callable[[], Plan],
    ) -> Plan:
        """Returns the plan that is kept, or makes one and keeps it.

        Args:
          analysis: the step.
          cluster: what is planned for.
          options: hints and limits.
          make: plans the step.
        """
        path = self._path(analysis, cluster, options)
        found = _read(path, analysis)
        if found is None:
            found = make()
            _write(path, found)
        return found

    def find(
        self, analysis: Analysis, cluster: Cluster, options: PlanOptions
    ) -> Plan | None:
        """Returns the plan that is kept; None where there is none."""
        return _read(self._path(analysis, cluster, options), analysis)

    def _path(self, analysis: Analysis, cluster: Cluster, options: PlanOptions) -> Path:
        return self.folder / f"{_key(analysis, cluster, options)}.json"


def _key(analysis: Analysis, cluster: Cluster, options: PlanOptions) -> str:
    """32 hex digits of all that a plan depends on."""
    said = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name != "layouts"
    }
    layouts = b"" if options.layouts is None else msgspec.json.encode(options.layouts)
    parts = [
        __version__,
        analysis.fingerprint,
        cluster.fingerprint(),
        *(f"{name}={_text(value)}" for name, value in sorted(said.items())),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    digest.update(layouts)
    return digest.hexdigest()[:32]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value)
        return repr(sorted((key, repr(pairs[key])) for key in pairs))
    return repr(value)


def _read(path: Path, analysis: Analysis) -> Plan | None:
    """The plan of a file; None where there is none that can be used."""
    try:
        found = Plan.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, PlanError) as error:
        warnings.warn(
            f"the kept plan {path} cannot be read and is made anew: {error}",
            stacklevel=2,
        )
        return None
    try:
        split = split_as(analysis, found)
    except PlanError:
        return None
    return found if found.fingerprint == split.fingerprint else None


def _write(path: Path, plan: Plan) -> None:
    """Writes a file as a whole: another process sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        plan.save(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
