"""The program of a plan: of one stage, or of several."""

from __future__ import annotations

from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.planned import PipelinedStep

AnyStep = PlannedStep | PipelinedStep
