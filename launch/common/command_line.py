"""The parser of every command line. Wrong input has exit code 1."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from launch.common.text import is_utf8


class Parser(argparse.ArgumentParser):
    """argparse, with exit code 1 for wrong input."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse ``args``. Refuse bytes that are not UTF-8, because messages and records cannot contain them."""
        for word in sys.argv[1:] if args is None else args:
            if not is_utf8(word):
                self.error(f"{word!r} is not UTF-8 text: write it in UTF-8, and rename a file of such a name")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"error: {message}{_suggest(message)}\n")


def _suggest(message: str) -> str:
    """Return a hint if argparse misses the verb, or "; did you mean ...?" for a word that is not one of the choices."""
    if message.endswith("required: VERB"):
        return "; --help lists the verbs"
    if not (found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)):
        return ""
    import difflib

    # With the usual cutoff of 0.6, "run" would give prune, which deletes.
    close = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""
