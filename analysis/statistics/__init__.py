"""Student's t and intervals from it."""
