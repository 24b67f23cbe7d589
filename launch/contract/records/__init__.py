"""The records that a run writes, one shape per file. Loading a record parses JSON and runs none of its content."""
