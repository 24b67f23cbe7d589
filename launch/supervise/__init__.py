"""Run a bundle in the job: the supervisor, the attempts and the processes of ranks; no torch."""
