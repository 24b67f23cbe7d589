"""See a sweep through: order, submit, follow, retry, report."""
