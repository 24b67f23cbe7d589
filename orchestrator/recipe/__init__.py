"""From YAML and overrides to cells, every problem told at once."""
