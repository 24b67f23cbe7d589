"""A rank of a run: the worker process and its training loop."""
