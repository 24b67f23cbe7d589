"""A rank's memory: measured peaks, and the forecast from the recipe."""
