"""From records to words: pairs, verdicts, plots and the report. Reads records only, never a live run."""
