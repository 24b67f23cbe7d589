"""The file ``cancel`` of a bundle. It ends all runs, or only the runs that it lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launch.common.atomic_files import RecordError, read_json
from launch.contract.paths import BundlePaths


@dataclass(frozen=True)
class Cancellation:
    """The runs to end. Empty ``run_ids`` ends every run of the bundle, including runs that have not started."""

    run_ids: Collection[str] = ()

    def covers(self, run_id: str) -> bool:
        return not self.run_ids or run_id in self.run_ids


def read_cancellation(bundle: BundlePaths) -> Cancellation | None:
    """Return the cancelled runs, or None if nothing is cancelled.

    A file that lists no runs (empty, ``null``, ``[]``, or written by hand) cancels all runs.
    """
    try:
        listed = read_json(bundle.cancel)
    except FileNotFoundError:
        return None
    except RecordError:
        listed = None
    return Cancellation(frozenset(map(str, listed)) if isinstance(listed, list) else ())
