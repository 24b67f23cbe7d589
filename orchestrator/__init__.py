"""The orchestrator, on the login node: from a recipe to a plan, to jobs, to a report. It never imports torch."""

__version__ = "0.2.0"
