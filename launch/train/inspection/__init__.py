"""Find the lines of a step that cannot be captured, for `advise`."""
