"""Run a sweep to its end: start its runs, watch them, retry them, report."""
