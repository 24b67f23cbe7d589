"""Which lines of a step cannot be captured, for `advise`."""
