"""The records that a run writes, one shape per file. Loading a record only parses JSON."""
