"""Slurm's programs and what they print; knows no sweep."""
