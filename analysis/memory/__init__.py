"""Memory of a rank: measured peaks, and the forecast from the recipe."""
