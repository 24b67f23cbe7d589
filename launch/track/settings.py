"""Where the runs of a sweep are logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

TrackMode = Literal["auto", "online", "offline", "disabled"]


@dataclass(frozen=True)
class TrackSettings:
    """Where a sweep's runs are logged. ``group`` is the sweep's name. ``entity`` None means the key owner's default.

    Raises:
        ValueError: ``mode`` is not one of auto, online, offline, disabled.
    """

    project: str
    group: str
    entity: str | None = None
    mode: TrackMode = "auto"
    tags: tuple[str, ...] = ()
    tensorboard: bool = False
    """Whether each attempt also gets event files of TensorBoard."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(TrackMode):
            raise ValueError(f"tracking mode={self.mode!r} is unknown; use one of {', '.join(get_args(TrackMode))}")


def settings_from_json(content: Mapping[str, Any]) -> TrackSettings:
    """Return the settings whose ``dataclasses.asdict`` is ``content``. Keys with a default may be missing.

    Raises:
        TypeError: a key is missing or unknown.
        ValueError: the mode is unknown.
    """
    return TrackSettings(**dict(content) | {"tags": tuple(content.get("tags", ()))})
