"""The base of all our errors, and the errors that a job raises. Those of the login node are in orchestrator.errors.

OrchestratorError
├── UnsupportedError   the engine does not support a setting of the spec, but another setting or engine does
├── DataError          the data is missing, unreadable, or does not fit the model
├── CheckpointError    the weights are missing, unreadable, or of another model
├── EnvironmentFault   the host or its software cannot execute this run
├── CompileError       the code that training.compile names could not be compiled
├── CaptureError       a graph could not be captured: a result of the run, not an accident
├── ReplayError        an input of a graph is not the one that was captured
├── ProgramError       the user's program did not do what its run needs
└── NumericError       a loss or a gradient norm is NaN or infinite
"""

from __future__ import annotations

from launch.contract.exit_codes import ExitCode


class OrchestratorError(Exception):
    """Base of the errors that print only their message, without a traceback. A job's message has the field, value and fix."""

    exit_code = ExitCode.UNFINISHED
    """The exit code of a command that the error ends."""


class UnsupportedError(OrchestratorError):
    """The engine does not support a setting of the spec."""


class DataError(OrchestratorError):
    """Data is missing, unreadable, or does not fit the model."""


class CheckpointError(OrchestratorError):
    """A checkpoint is missing, unreadable, or does not fit the model of the recipe."""


class EnvironmentFault(OrchestratorError):
    """The host lacks something that the run needs."""


class CompileError(OrchestratorError):
    """The code that training.compile names could not be compiled."""


class CaptureError(OrchestratorError):
    """A graph could not be captured."""


class ReplayError(OrchestratorError):
    """An input of a graph is not the one that was captured."""


class ProgramError(OrchestratorError):
    """The user's program did not do what its run needs."""


class NumericError(OrchestratorError):
    """A loss or a gradient norm is not finite."""
