"""What runs in the job: the contract (spec, record), the bundle's supervisor, the workers and the engines."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder of this program's packages: the checkout, or the folder that pip installed."""
