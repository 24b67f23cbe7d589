"""Every error that the job raises on purpose.

LaunchError
├── UnsupportedError   the engine cannot do what the spec asks; another setting or engine can
├── DataError          the data cannot be read as the spec asks
├── CheckpointError    the weights cannot be read, or are those of another model
├── EnvironmentFault   the host or its software cannot run this at all
├── CompileError       what was to be compiled could not be
├── CaptureError       the capture of a graph failed; the result of a graphed run, not an accident
├── ReplayError        a graph was to run on something else than what it was captured with
└── NumericError       a loss or a gradient norm is NaN or infinite
"""

from __future__ import annotations


class LaunchError(Exception):
    """Base of the errors of a job. The message names the field, its value and the way out."""


class UnsupportedError(LaunchError):
    """The engine refuses by name what it does not support."""


class DataError(LaunchError):
    """Data is missing, unreadable, or does not fit the model."""


class CheckpointError(LaunchError):
    """A checkpoint is missing, unreadable, or not one of the model that the recipe describes."""


class EnvironmentFault(LaunchError):
    """What the run needs of its host is not there."""


class CompileError(LaunchError):
    """Code that training.compile names could not be compiled."""


class CaptureError(LaunchError):
    """Graphs could not be captured."""


class ReplayError(LaunchError):
    """An input of a graph is not what was captured."""


class NumericError(LaunchError):
    """Training produced a number that is not finite."""
