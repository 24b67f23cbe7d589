"""docs/commands.md shows the exit codes that the commands have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launch.contract.exit_codes import LOSS, OF_EVERY_COMMAND, OWN, ExitCode, exit_codes_of
from orchestrator.cli.verbs import VERBS

COMMANDS = Path(__file__).resolve().parents[3] / "docs" / "commands.md"


def rows_of_table() -> Iterator[str]:
    """Yield the rows of the table in docs/commands.md."""
    commands: dict[tuple[tuple[ExitCode, str], ...], list[str]] = {}
    for command, own in OWN.items():
        commands.setdefault(tuple(own.items()), []).append(f"`{command}`")
    yield from (f"| every command | {code} | {meaning} |" for code, meaning in OF_EVERY_COMMAND.items())
    for own_codes, names in commands.items():
        for code, meaning in own_codes:
            yield f"| {', '.join(names)} | {code} | {meaning} |"


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    assert "\n".join(rows_of_table()) in COMMANDS.read_text()
    assert all({0, 1, 2, 130, 141} <= exit_codes_of(command).keys() for command in [*VERBS, LOSS])
