"""What a bundle's file ``cancel`` asks for: the end of all its runs, or of those that it lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launch.common.atomic_files import RecordError, read_json
from launch.contract.paths import BundlePaths


@dataclass(frozen=True)
class Cancellation:
    """``run_ids`` is empty where every run of the bundle is to end, those not begun included."""

    run_ids: Collection[str] = ()

    def covers(self, run_id: str) -> bool:
        return not self.run_ids or run_id in self.run_ids


def read_cancellation(bundle: BundlePaths) -> Cancellation | None:
    """What is cancelled, None where nothing is. A file that lists no runs (empty, ``null``, ``[]``, or a person's own)
    means all."""
    try:
        listed = read_json(bundle.cancel)
    except FileNotFoundError:
        return None
    except RecordError:
        listed = None
    return Cancellation(frozenset(map(str, listed)) if isinstance(listed, list) else ())
