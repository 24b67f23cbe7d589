"""Read YAML and overrides into cells, and report every problem at once."""
