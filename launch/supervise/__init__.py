"""In the job, a bundle: its supervisor, attempts and ranks' processes; no torch."""
