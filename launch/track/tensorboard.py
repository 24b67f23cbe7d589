"""TensorBoard's event files of an attempt: <sweep>/tracking/tensorboard/RUN/ATTEMPT."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFiles:
    """The event files in a folder, which replace those of an earlier delivery."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, row: Mapping[str, Any]) -> None:
        self._add(row, row["step"])

    def finish(self, summary: Mapping[str, Any], *, complete: bool) -> None:
        self._add({f"summary/{name}": value for name, value in summary.items()}, 0)
        self._writer.close()

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "step"}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        if scalars:
            self._writer.add_event(Event(step=step, summary=Summary(value=scalars)))
