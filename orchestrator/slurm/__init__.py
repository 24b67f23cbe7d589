"""What Slurm's commands print, and which of their options a profile may set."""
