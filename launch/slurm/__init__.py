"""Slurm's commands and states, as a job and the login node need them."""
