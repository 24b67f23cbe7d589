"""What a run leaves behind: one shape a file. Loading a record parses JSON and nothing else."""
