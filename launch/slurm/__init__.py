"""What a job asks Slurm of itself."""
