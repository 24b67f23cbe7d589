"""Read what Slurm's commands print."""
