"""The targets that can run a cell: this host, or a Slurm cluster with a site's profile."""
