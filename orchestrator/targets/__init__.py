"""What can hold a run: this host, or a Slurm cluster with a site's profile."""
