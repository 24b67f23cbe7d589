"""Student's t and standard errors."""
