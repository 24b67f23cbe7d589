"""In the job, a rank: the worker and its training loop."""
