"""Files, locks, digests, text and redaction. Nothing here knows about runs."""
