"""Bundles handed to this host or to Slurm, and taken back."""
