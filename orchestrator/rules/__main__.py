"""Print docs/rules.md."""

import sys

from orchestrator.rules import as_markdown

sys.stdout.write(as_markdown())
