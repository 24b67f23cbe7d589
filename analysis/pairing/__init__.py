"""Compare graphed runs with the eager runs of their workload."""
