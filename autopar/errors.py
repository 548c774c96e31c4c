"""The errors of autopar: ``except autopar.AutoparError`` catches every one.

Errors that the user can fix are also a ``ValueError`` or a ``TypeError``. All other
errors are neither::

    AutoparError (Exception)
    ├── InputError (ValueError)   what was given is wrong, such as a codec's field
    │   ├── TraceError                the step cannot be traced
    │   ├── ClusterError              a cluster description is wrong
    │   ├── PlanError                 a plan is wrong, or belongs to another step
    │   │   └── InfeasibleError           no plan fits the memory of a device
    │   ├── TargetError               a command-line target cannot be loaded
    │   ├── CheckpointError           a checkpoint cannot be written, read or used
    │   ├── EventError                an event of an elastic run is wrong
    │   └── ScheduleError             a trace, a table of jobs or an allocation is wrong
    ├── InputTypeError (TypeError)    what was given is of a wrong type
    ├── CompileError              the compiler of an accelerator refuses a step
    ├── RunError (RuntimeError)   a run cannot go on
    │   ├── StageError                a task of a pipeline failed
    │   └── NotFiniteError            steps of a run are NaN or infinite
    └── InternalError (RuntimeError)  autopar itself is wrong: report it

The classes that all packages share are defined in the package ``autopar_errors``.
"""

from __future__ import annotations

from autopar.cluster.specs import ClusterError
from autopar_errors import (
    AutoparError,
    InputError,
    InputTypeError,
    InternalError,
    TraceError,
    user_line,
)

__all__ = [
    "AutoparError",
    "CheckpointError",
    "ClusterError",
    "CompileError",
    "EventError",
    "InfeasibleError",
    "InputError",
    "InputTypeError",
    "InternalError",
    "NotFiniteError",
    "PlanError",
    "RunError",
    "ScheduleError",
    "StageError",
    "TargetError",
    "TraceError",
    "user_line",
]


class PlanError(InputError):
    """A plan cannot be made, read or applied."""


class InfeasibleError(PlanError):
    """No plan fits the memory of a device.

    Attributes:
      least_bytes: a lower bound of the memory per device of any plan; 0 if no bound is
        known.
      enough_bytes: memory per device for which a plan was found; None if no plan was
        found.
      free_s: seconds of a step with unlimited memory; 0 if not known.
    """

    least_bytes: float = 0.0
    enough_bytes: int | None = None
    free_s: float = 0.0


class TargetError(InputError):
    """A target such as ``file.py:function`` cannot be loaded."""


class CompileError(AutoparError):
    """The compiler of an accelerator refuses a program, or ends without a message."""


class ScheduleError(InputError):
    """A trace, a table of jobs, a curve or an allocation is wrong.

    The message names the row.
    """


class RunError(AutoparError, RuntimeError):
    """A run cannot continue, for a reason other than its inputs."""


class StageError(RunError):
    """A task of a pipeline failed; the state is unchanged since before the step."""


class NotFiniteError(RunError):
    """Steps of a run are not finite; the state after the last finite step is kept.

    Attributes:
      step: number of steps after which the state was finite for the last time.
    """

    def __init__(self, message: str, *, step: int = 0) -> None:
        """Stores the message and the number of steps after which the state was last
        finite.
        """
        super().__init__(message)
        self.step = step


class CheckpointError(InputError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""


class EventError(InputError):
    """An event of an elastic run is wrong; the run ignores the event and continues."""
