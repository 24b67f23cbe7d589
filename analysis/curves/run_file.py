"""Read the curve of a run made elsewhere from what its program left: a log, or the file of a logger.

CSV and JSON lines are read strictly (analysis.curves.curve). The other files hold more than steps, so rows without a loss are
left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.curves.curve import Curve, CurveError, Digits, Row, curve_of, read_rows, read_text
from analysis.curves.event_file import read_events
from analysis.curves.log_settings import collect_settings, may_name_setting, settings_in_line
from analysis.curves.wandb_file import read_history
from launch.contract.metric_names import column_of, comma_in_line, texts_in_line

_LOGS = (".log", ".out", ".err", ".txt")
_RANK = re.compile(r"^[0-9]+(?=: )|\b(?:rank|default)[ _:=]?[0-9]+\b", re.IGNORECASE)
"""What srun, torchrun and programs write before the lines of a rank."""
_SKIPPED = re.compile(r"\biteration +(\d+)/.*\bnumber of skipped iterations: +[1-9]")
"""The line of Megatron-LM for a step that loss scaling skipped. It has no loss."""
_SKIPPED_STEP = "skipped step"
"""The column of such steps."""
_BAR = re.compile(r"\b(\d+)/\d+ \[[\d:]+<")
"""The position of a progress bar: 12/120 [00:01<00:09."""
_KNOWN = ("*tfevents*", "*.wandb", "trainer_state.json", "metrics.csv")
"""The names of known files in a folder."""


def read_run(path: Path) -> Curve:
    """Return the curve in ``path``, a file or a folder with one known file.

    Raises:
        CurveError: it cannot be read, or holds no curve.
    """
    file = file_of(path)
    reader = _reader_of(file)
    rows = list(reader(file)) if reader else read_rows(file)
    skipped = frozenset(int(row[_SKIPPED_STEP]) for _, row in rows if _SKIPPED_STEP in row)
    curve = curve_of(file, _with_loss(rows) if reader else rows)
    return replace(curve, settings=collect_settings(rows), skipped=skipped if reader else frozenset())


def file_of(path: Path) -> Path:
    """Return ``path`` or, if it is a folder, the one known file in it.

    Raises:
        CurveError: the folder has no known file, or several.
    """
    if not path.is_dir():
        return path
    folder = path
    found = [file for pattern in _KNOWN for file in sorted(folder.rglob(pattern)) if file.is_file()]
    if len(found) != 1:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:4]) or "none"
        raise CurveError(
            f"{folder}: Is a directory; of {', '.join(_KNOWN)} it must hold one file, not {names}; name a file"
        )
    return found[0]


def _reader_of(file: Path) -> Callable[[Path], Iterator[Row]] | None:
    if "tfevents" in file.name:
        return read_events
    if file.suffix == ".wandb":
        return read_history
    if file.name == "trainer_state.json":
        return _read_trainer_state
    return _read_log if file.suffix in _LOGS else None


def _read_log(path: Path) -> Iterator[Row]:
    """Yield the steps that a log shows. If no line has a step number, count the lines; else skip lines without one."""
    rows: list[Row] = []
    bars: list[int | None] = []
    ranks: set[str] = set()
    for number, line, whole in _lines(path):
        lowered = line.lower()
        is_setting = may_name_setting(lowered)
        # Most lines of a long log show neither.
        if not is_setting and "loss" not in lowered:
            continue
        at, settings = f"{path}, line {number}", settings_in_line(line) if is_setting else {}
        if comma := comma_in_line(line):
            raise CurveError(f"{at}: {comma!r} has a comma; write numbers with a decimal point and without groups")
        if said := texts_in_line(line):
            if not whole and line[-1] in "0123456789.":
                raise CurveError(
                    f"{at}: the file ends in {line[-40:]!r}, which may lack digits; end this line, or delete it"
                )
            rows.append((at, settings | {str(name): text for name, text in said.items()}))
            # Only lines without a step number need these, and finding them takes long.
            if "step" not in said:
                ranks.update(rank[0] for rank in _RANK.finditer(line))
                bars.append(int(found[1]) if (found := _BAR.search(line)) else None)
        elif settings:
            skipped = _SKIPPED.search(line)
            yield at, settings | ({_SKIPPED_STEP: skipped[1]} if skipped else {})
    if not rows:
        raise CurveError(f"{path}: no line shows a loss by a usual name, such as loss or lm loss")
    numbered = [(at, row) for at, row in rows if "step" in row]
    if not numbered and len(ranks) > 1:
        raise CurveError(
            f"{path}: lines of {', '.join(sorted(ranks)[:4])} without step numbers; keep only the lines of one rank"
        )
    yield from numbered or [(at, {"step": place, **row}) for place, (at, row) in enumerate(_counted(rows, bars))]


def _lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield each line of a log with its number, and whether it has an end. Carriage returns end lines too, without a number."""
    *lines, last = read_text(path, invalid="replace").split("\n")
    for number, line in enumerate([*lines, last], start=1):
        *parts, rest = line.split("\r") if "\r" in line else (line,)
        for part in parts:
            yield number, part, True
        yield number, rest, number <= len(lines)


def _counted(rows: Sequence[Row], bars: Sequence[int | None]) -> list[Row]:
    """Return the rows that are steps, given rows without step numbers.

    Raises:
        CurveError: a progress bar leaves out steps, or the log shows each step twice.
    """
    kept = _drawn_last(rows, bars)
    firsts, seconds = kept[::2], kept[1::2]
    if len(seconds) > 1 and all(first == second for (_, first), (_, second) in zip(firsts, seconds, strict=False)):
        raise CurveError(
            f"{seconds[0][0]}: the same numbers as {firsts[0][0].rpartition(', ')[2]}, and so on; keep one line of each step"
        )
    return kept


def _drawn_last(rows: Sequence[Row], bars: Sequence[int | None]) -> list[Row]:
    """Return the rows. Where a progress bar was drawn several times at one position, return only the last of these rows.

    Raises:
        CurveError: a bar leaves out steps. It draws by time, so it does not leave out the same steps in each run.
    """
    kept: list[Row] = []
    for (at, row), before, bar in zip(rows, (None, *bars), bars, strict=False):
        if bar is not None and bar == before:
            kept.pop()
        elif bar is not None and before is not None and bar > before + 1:
            raise CurveError(f"{at}: the progress bar goes from {before} to {bar}; log the loss of every step")
        kept.append((at, row))
    return kept


def _read_trainer_state(path: Path) -> Iterator[Row]:
    try:
        content = json.loads(read_text(path), parse_float=Digits)
        rows = [dict(row) for row in content["log_history"]]
        settings = {name: value for name, value in content.items() if name != "log_history"}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CurveError(f"{path}: not the state of a Trainer, which has a log_history") from error
    yield str(path), settings
    for number, row in enumerate(rows):
        yield f"{path}, log_history[{number}]", row


def _with_loss(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of training steps, which have a loss. A Trainer's summary has another name for its mean loss."""
    names = dict.fromkeys(str(name) for _, row in rows for name in row)
    loss = "loss" if "loss" in names else next((name for name in names if column_of(name) == "loss"), "loss")
    return [(at, _known(row)) for at, row in rows if loss in row]


def _known(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, (dict, list))}
