"""The program's reports of each step's loss and gradient norm, by source. The best one that shows every step is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

from launch.contract.metric_names import Column, is_value_of, known_names, texts_in_line
from launch.contract.records.step_metrics import Metric

Source = Literal[
    "launch.observe.step", "the program's own functions", "its logger", "computed by the observer", "printed"
]
SOURCES: tuple[Source, ...] = get_args(Source)
"""The best first. Printed digits may be rounded."""
LONGEST_LINE = 10_000


class Later(Protocol):
    """A number that may not be computed yet."""

    def ready(self) -> bool: ...

    def read(self) -> float: ...


class Known:
    """A number that is already known."""

    def __init__(self, value: float) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def read(self) -> float:
        return self._value


class Sum:
    """The sum of numbers that may not be computed yet."""

    def __init__(self, *parts: Later) -> None:
        self.parts = [*parts]

    def ready(self) -> bool:
        return all(part.ready() for part in self.parts)

    def read(self) -> float:
        return sum(part.read() for part in self.parts)


class MetricLog:
    """Values by metric, source and step, counted from 0. Once :meth:`settle` has chosen, only those of one source."""

    def __init__(self) -> None:
        self._values: dict[Metric, dict[Source, dict[int, Later]]] = {"loss": {}, "grad_norm": {}}
        self._settled: dict[Metric, Source] = {}
        self._first_number: dict[Source, int] = {}
        self._last_number: dict[Source, int] = {}
        self._began: dict[Source, int] = {}
        """The number of steps that had ended at the first number of each source."""
        self._early: dict[tuple[Source, bool], bool] = {}
        """Whether a source's lines, with or without a step number, are printed before the optimizer steps."""
        self._unnumbered: set[tuple[Metric, int]] = set()
        """The values that were printed without a step number."""
        self._contradictions: dict[tuple[Metric, int], str] = {}
        """Printed numbers that differ from an earlier one of the same step. One of them counts."""

    def wants(self, metric: Metric, source: Source) -> bool:
        """Return whether ``source`` may be, or is, the one whose values of ``metric`` count."""
        return self._settled.get(metric, source) == source

    def settle(self, steps: int) -> None:
        """Choose the source of each metric for the whole run: the best one that shows each of the first ``steps`` steps.

        A program may print every step and give only some of them to its logger. If no source shows them all, the best one that
        shows any counts.
        """
        for metric, values in self._values.items():
            every = (one for one in SOURCES if all(step in values.get(one, {}) for step in range(steps)))
            if (chosen := next(every, self.source(metric))) is not None and metric not in self._settled:
                self._settled[metric] = chosen
                self._values[metric] = {chosen: values[chosen]}

    def add_to(self, metric: Metric, source: Source, step: int, value: Later) -> None:
        """Add ``value`` to what ``source`` gave for this step, if anything."""
        known = self._values[metric].get(source, {}).get(step)
        if isinstance(known, Sum):
            known.parts.append(value)
        else:
            self.add(metric, source, step, Sum(known, value) if known else value)

    def add(
        self, metric: Metric, source: Source, step: int, value: Later, *, numbered: bool = True, early: bool = False
    ) -> None:
        """Take ``value`` for this step. Of printed ones that differ the first counts, or the last before an optimizer's step
        (``early``).
        """
        if not self.wants(metric, source):
            return
        values = self._values[metric].setdefault(source, {})
        known, loose = values.get(step) if source == "printed" else None, (metric, step) in self._unnumbered
        if known is None or (loose and numbered):
            values[step] = value
            if source == "printed":
                self._contradictions.pop((metric, step), None)
                (self._unnumbered.discard if numbered else self._unnumbered.add)((metric, step))
        elif loose != numbered and repr(known.read()) != repr(value.read()):
            text = f"a {metric} of {known.read():g} and one of {value.read():g} in step {step}"
            self._contradictions.setdefault((metric, step), text)
            if early:
                values[step] = value

    def say(self, source: Source, said: Mapping[Column, float], ended: int) -> None:
        """Take what the program reported after ``ended`` steps.

        The program's own step numbers count, whatever the first number is. They may start again, for example in each epoch.
        A program may keep its losses and show those of many steps at once. Then the last number is that of the last step.
        A printed line with a number counts more than one without.
        """
        numbered = "step" in said
        early = self._early.setdefault((source, numbered), ended == 0)
        step = now = ended if early else ended - 1
        if numbered:
            number = int(said["step"])
            if source not in self._first_number or number < self._last_number[source]:
                self._began[source] = ended if source not in self._began else -1
                self._first_number[source] = number - now
            elif ended == self._began[source] and number == self._last_number[source] + 1:
                self._move_back(source, now - (number - self._first_number[source]))
            self._last_number[source] = number
            step = number - self._first_number[source]
        for metric in self._values:
            if metric in said:
                self.add(metric, source, step, Known(said[metric]), numbered=numbered, early=early and not numbered)

    def _move_back(self, source: Source, distance: int) -> None:
        """Give the numbered values of ``source`` to earlier steps, if ``distance`` is negative and there are such steps."""
        numbered = {
            (metric, step): values[source][step]
            for metric, values in self._values.items()
            for step in values.get(source, {})
            if source != "printed" or (metric, step) not in self._unnumbered
        }
        if distance < 0 <= min((step for _, step in numbered), default=-1) + distance:
            self._first_number[source] -= distance
            for metric, step in numbered:
                del self._values[metric][source][step]
            for (metric, step), value in numbered.items():
                self._values[metric][source][step + distance] = value
                self._unnumbered.discard((metric, step + distance))

    def source(self, metric: Metric) -> Source | None:
        """Return the source that was chosen, or the best one so far, or None."""
        known = self._values[metric]
        return self._settled.get(metric) or next((source for source in SOURCES if source in known), None)

    @property
    def contradictions(self) -> dict[int, str]:
        """A contradiction of each step with one, if printed values count."""
        return {step: text for (metric, step), text in self._contradictions.items() if self.source(metric) == "printed"}

    @property
    def first_number(self) -> int | None:
        """The program's own number of the first step, by its losses, or None if they have no numbers."""
        source = self.source("loss")
        return self._first_number.get(source) if source else None

    def at(self, metric: Metric, step: int) -> Later | None:
        return self._counted(metric).get(step)

    def _counted(self, metric: Metric) -> dict[int, Later]:
        source = self.source(metric)
        return self._values[metric][source] if source else {}

    def awaits_number(self, step: int) -> bool:
        """Return whether a number of this step comes from a line without a step number, while other lines have one."""
        return "printed" in self._first_number and any(
            at == step and self.source(metric) == "printed" for metric, at in self._unnumbered
        )

    @property
    def furthest(self) -> int:
        """The last step with a loss that is not written, or -1."""
        return max(self._counted("loss"), default=-1)

    def forget(self, step: int) -> None:
        """Drop the values of a step that is written."""
        for of_metric in self._values.values():
            for values in of_metric.values():
                values.pop(step, None)
        self._unnumbered -= {("loss", step), ("grad_norm", step)}


def columns_in(record: Mapping[Any, Any]) -> dict[Column, float]:
    """Return the step, the loss and the gradient norm of a record with the program's names."""
    found: dict[Column, float] = {}
    for column, name in known_names(record):
        value = record[name]
        if column not in found and not isinstance(value, bool):
            try:
                # float() of a tensor with a gradient warns.
                number = float(value.detach() if hasattr(value, "detach") else value)
            except (TypeError, ValueError):
                continue
            if is_value_of(column, number):
                found[column] = number
    return found


def split_lines(text: str, rest: str) -> tuple[list[str], str]:
    """Return the lines of ``rest`` and ``text``, the next printed text, and the incomplete last line."""
    lines = (rest + text).replace("\r", "\n").split("\n")
    rest = lines.pop()[-LONGEST_LINE:]
    if text.startswith("\r"):  # a line that the next one overwrites
        return [*filter(None, lines), rest[:LONGEST_LINE]], ""
    return [line[:LONGEST_LINE] for line in lines if line], rest


def columns_in_line(line: str, pattern: str = "") -> dict[Column, float]:
    """Return the step, the loss and the gradient norm of a printed line.

    Without a ``pattern``, whose groups have these names, only a line with a loss has any.
    """
    if pattern:
        found = re.search(pattern, line)
        return columns_in(found.groupdict()) if found else {}
    return {column: float(text) for column, text in texts_in_line(line).items()}
