"""A sweep on disk and in the queue: its folder, its runs' states, its jobs."""
