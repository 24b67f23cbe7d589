"""Print docs/rules.md."""

import sys

from orchestrator.legality import as_markdown

sys.stdout.write(as_markdown())
