"""`python -m analysis.report SWEEP_FOLDER`: write the report of a sweep."""

from __future__ import annotations

import sys

from analysis.report.write_report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
