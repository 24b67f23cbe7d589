"""Files, locks, digests, redaction; knows nothing of runs."""
