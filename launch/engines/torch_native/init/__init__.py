"""Initial weights: drawn from a seed, or read from a checkpoint."""
