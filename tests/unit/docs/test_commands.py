"""docs/commands.md shows the exit codes that the commands have."""

from __future__ import annotations

from pathlib import Path

from launch.contract.exit_codes import LOSS, document_lines, exit_codes_of
from orchestrator.cli.verbs import VERBS

COMMANDS = Path(__file__).resolve().parents[3] / "docs" / "commands.md"


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    assert "\n".join(document_lines()) in COMMANDS.read_text()
    assert all({0, 1, 2, 130, 141} <= exit_codes_of(command).keys() for command in [*VERBS, LOSS])
