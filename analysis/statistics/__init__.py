"""Student's t and confidence intervals."""
