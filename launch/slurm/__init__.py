"""Slurm's commands and states, for jobs and the login node."""
