"""A site's constants of the memory forecast, a file of the store for each cluster: ``plan --calibrate`` writes it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from analysis.memory.calibration import SiteConstants
from analysis.memory.measured_constants import MEASURED, SITE, Constants
from launch.common.atomic_files import RecordError, write_json
from launch.common.typed_json import read_record
from orchestrator.errors import input_error


def constants_file(store: Path, cluster: str) -> Path:
    """Return the file for the profile ``cluster``, or for runs without a profile if it is ""."""
    return store / f"memory_constants{'.' * bool(cluster)}{cluster}.json"


def write_constants(file: Path, site: SiteConstants) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(site))


def read_constants(file: Path) -> Constants:
    """Return the constants of ``file``, or the built-in ones if the file does not exist.

    Raises:
        InputError: the file is damaged.
    """
    try:
        site = read_record(SiteConstants, file)
        if unknown := sorted(site.constants.keys() - SITE):
            raise RecordError(f"there is no constant {unknown[0]!r}")
    except (FileNotFoundError, NotADirectoryError):
        return MEASURED
    except RecordError as error:
        raise input_error(str(file), str(error), "delete it, or write it again by plan --calibrate SWEEP") from error
    return site.applied
