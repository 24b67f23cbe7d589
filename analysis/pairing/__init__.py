"""Graphed runs against the eager runs of their workload."""
