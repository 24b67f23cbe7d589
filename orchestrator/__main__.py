import gc

from orchestrator.cli.main import run

# Run records form no reference cycles. Searching thousands of them for cycles would take a fifth of the time.
gc.set_threshold(100_000)
run()
