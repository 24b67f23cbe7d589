"""Step times and speed-ups."""
