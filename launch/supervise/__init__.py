"""Run a bundle in the job: its supervisor, its attempts and the processes of ranks; no torch."""
