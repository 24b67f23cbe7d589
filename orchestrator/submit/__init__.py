"""Submit bundles to this host or to Slurm, and cancel them."""
