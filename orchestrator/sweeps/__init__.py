"""A sweep on disk and in the queue: its folder, the states of its runs, and its jobs."""
