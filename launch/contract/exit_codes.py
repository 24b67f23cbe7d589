"""The exit codes of all commands: one table, which ``--help`` and docs/commands.md show."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    PASS = 0
    WRONG_INPUT = 1
    UNFINISHED = 2
    FAILED = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130
    """Shells report this code for a command that Ctrl-C ended."""
    CLOSED_PIPE = 141
    """Shells report this code for a command whose reader closed the pipe."""


LOSS = "analysis.loss"
OF_EVERY_COMMAND: Mapping[ExitCode, str] = {
    ExitCode.WRONG_INPUT: "the input is wrong (option, name, recipe, file)",
    ExitCode.UNFINISHED: "the system failed",
    ExitCode.INTERRUPTED: "Ctrl-C ended the command before the result was known",
    ExitCode.CLOSED_PIPE: "the reader closed the pipe before the result was known",
}
_LOST = "the system failed, or a run was lost or never began"
_REPORT = {
    ExitCode.PASS: "every loss verdict passes, whatever the speed verdicts, and every outcome is as expected",
    ExitCode.UNFINISHED: _LOST,
    ExitCode.FAILED: "a loss verdict is DIVERGED or INCOMPARABLE, or an outcome was unexpected",
    ExitCode.INCONCLUSIVE: "nothing failed, but a loss verdict is INCONCLUSIVE, or graphed cells could not run here (0 with --allow-empty)",
}
OWN: Mapping[str, Mapping[ExitCode, str]] = {
    "sweep": _REPORT,
    "wrap": _REPORT,
    "resume": _REPORT,
    "report": _REPORT,
    "plan": {ExitCode.PASS: "the plan is printed, whatever it rejects"},
    "advise": {
        ExitCode.PASS: "every eager run that could start completed, whatever the advice",
        ExitCode.UNFINISHED: _LOST,
        ExitCode.FAILED: "a run failed",
    },
    "status": {ExitCode.PASS: "the states are printed"},
    "compare": {
        ExitCode.PASS: "nothing is worse than before",
        ExitCode.UNFINISHED: "the system failed, or a run of the second sweep has no outcome",
        ExitCode.FAILED: "an outcome, a verdict, a speed-up or memory is worse, a cell is missing, or a new one does not pass",
        ExitCode.INCONCLUSIVE: "nothing is worse, but something that was known before is unknown now",
    },
    "bisect": {
        ExitCode.PASS: "the smallest set that fails, or the first layer that differs, is found",
        ExitCode.WRONG_INPUT: "the input is wrong, graphs are not known to be the cause, or there is no smaller set to try",
        ExitCode.UNFINISHED: _LOST,
        ExitCode.INCONCLUSIVE: "the failure does not occur again, a smaller set is unclear, or eager runs differ as early",
    },
    "logs": {ExitCode.PASS: "the log is printed"},
    "cancel": {ExitCode.PASS: "the runs are cancelled, or had ended"},
    "prune": {
        ExitCode.PASS: "everything that may be deleted is deleted",
        ExitCode.UNFINISHED: "the system failed, or cannot tell whether a sweep still runs, or a folder is not a sweep",
    },
    "doctor": {ExitCode.PASS: "no check fails", ExitCode.FAILED: "a check fails"},
    "init": {ExitCode.PASS: "the recipe or profile is printed"},
    "export": {ExitCode.PASS: "the flags are printed"},
    LOSS: {
        ExitCode.PASS: "BITWISE or EQUIVALENT",
        ExitCode.UNFINISHED: "the verdict could not be written",
        ExitCode.FAILED: "DIVERGED or INCOMPARABLE, also for files without a curve",
        ExitCode.INCONCLUSIVE: "INCONCLUSIVE",
    },
}
"""The meanings of codes per command. They override ``OF_EVERY_COMMAND``."""


def exit_codes_of(command: str) -> dict[ExitCode, str]:
    """Return the exit codes of ``command``, a verb or :data:`LOSS`, with their meanings."""
    meanings = {**OF_EVERY_COMMAND, **OWN[command]}
    return {code: meanings[code] for code in ExitCode if code in meanings}


def help_lines(command: str) -> str:
    """Return the end of the help text of ``command``."""
    return "exit codes:\n" + "".join(f"  {code}  {meaning}\n" for code, meaning in exit_codes_of(command).items())
