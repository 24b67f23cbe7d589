import gc

from orchestrator.cli.main import run

# Records of thousands of runs refer to nothing that refers to them: looking for cycles among them takes a fifth of the time.
gc.set_threshold(100_000)
run()
