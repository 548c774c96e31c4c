"""Keeps plans on disk, under a key of all inputs that a plan depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import offered_codecs, parse_codec
from autopar.errors import PlanError
from autopar.planner.option_texts import OPTIONS, PLANNING
from autopar.planner.options import PlanOptions
from autopar.planner.record import split_as
from autopar.plans import Plan
from autopar.sealed_files import SealedFolder
from autopar.steps.analysis import Analysis
from autopar.version import __version__


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans.

    The key of a plan is a hash of the step's fingerprint (its program and shapes), the
    cluster, the options and the version of autopar.

    Attributes:
      folder: where the plans are; created when the first plan is stored.
    """

    folder: Path

    def plan(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: PlanOptions,
        make: Callable[[], Plan],
    ) -> Plan:
        """Returns the stored plan; if there is none, makes a plan and stores it.

        Args:
          analysis: the step.
          cluster: the devices that the plan is for.
          options: hints and limits.
          make: plans the step.
        """
        found = self.find(analysis, cluster, options)
        if found is None:
            found = make()
            name = _file_name(analysis, cluster, options)
            self._files.write(name, msgspec.json.encode(found))
        return found

    def find(
        self, analysis: Analysis, cluster: Cluster, options: PlanOptions
    ) -> Plan | None:
        """Returns the stored plan for these inputs; None if none is stored."""
        name = _file_name(analysis, cluster, options)
        data = self._files.read(name)
        if data is None:
            return None
        try:
            found = Plan.from_json(data)
            split = split_as(analysis, found)
        except PlanError as error:
            self._files.reject(name, str(error))
            return None
        return found if found.fingerprint == split.fingerprint else None

    @property
    def _files(self) -> SealedFolder:
        return SealedFolder(self.folder, "plan")


def _file_name(analysis: Analysis, cluster: Cluster, options: PlanOptions) -> str:
    """Returns a file name with a hash of all inputs that a plan depends on."""
    said = {
        name: getattr(options, name)
        for name, option in OPTIONS.items()
        if option.group == PLANNING and name != "layouts"
    }
    layouts = b"" if options.layouts is None else msgspec.json.encode(options.layouts)
    parts = [
        __version__,
        analysis.fingerprint,
        cluster.fingerprint(),
        *(f"{name}={_text(value)}" for name, value in sorted(said.items())),
        repr(options.spares),
        options.one_stage,
        repr(options.may_idle),
        repr(options.may_pad),
        *_figures(options.compression),
        *(f"at hand {x.path}" for x in analysis.graph.inputs if x.at_hand),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    digest.update(layouts)
    return f"{digest.hexdigest()[:32]}.json"


# An example shape of a gradient. The key of a plan contains the costs of codecs for it
# (`_figures`).
_SHAPE = (1024, 1024)


def _figures(compression: str) -> list[str]:
    """Returns the costs and errors that each codec states for an example gradient.

    The costs and errors of codecs are part of the key of a plan, because a program may
    register codecs of its own, and may change them later under the same names.
    """
    known = {"none": (), "auto": offered_codecs()}
    codecs = [
        (text, parse_codec(text)) for text in known.get(compression, (compression,))
    ]
    return [f"{text}: {c.error(_SHAPE)!r} {c.cost(_SHAPE)!r}" for text, c in codecs]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value)
        return repr(sorted((key, repr(pairs[key])) for key in pairs))
    return repr(value)
