"""Where the runs of a sweep are logged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrackMode = Literal["auto", "online", "offline", "disabled"]


@dataclass(frozen=True)
class TrackSettings:
    """Where a sweep's runs are logged. ``group`` is the sweep's name. ``entity`` None means the key owner's default."""

    project: str
    group: str
    entity: str | None = None
    mode: TrackMode = "auto"
    tags: tuple[str, ...] = ()
    tensorboard: bool = False
    """Whether each attempt also gets event files of TensorBoard."""
