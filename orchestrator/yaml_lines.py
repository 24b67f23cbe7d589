"""Where a key stands in a YAML file, for messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

import yaml


class LineIndex:
    """Line numbers of the keys and list items of one YAML file; empty where the file is not YAML."""

    def __init__(self, path: Path) -> None:
        self._lines: dict[str, int] = {}
        try:
            root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return
        if root is not None:
            self._index(root, "")

    def line(self, key: str) -> Optional[int]:
        """The line of ``key`` (dotted, with [i] for list items), or of the nearest key around it."""
        while key:
            if key in self._lines:
                return self._lines[key]
            key = re.sub(r"(\.[^.\[\]]*|\[\d+\]|^[^.\[\]]*)$", "", key)
        return None

    def _index(self, node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = f"{prefix}.{key.value}" if prefix else str(key.value)
                self._lines[path] = key.start_mark.line + 1
                self._index(value, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[f"{prefix}[{index}]"] = item.start_mark.line + 1
                self._index(item, f"{prefix}[{index}]")
