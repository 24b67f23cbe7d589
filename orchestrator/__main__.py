from orchestrator.cli import run

run()
