"""A YAML file as plain values, with the line of every key, so that messages can name it.

PyYAML silently keeps the last of two equal keys, and stops at the first flaw. This module collects all flaws of a file:
repeated keys, keys that are not text, tags. It stops only at text that is not YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.common.regular_file import read_regular
from orchestrator import PROGRAM
from orchestrator.errors import InputError, Problem, input_error
from orchestrator.suggestion import suggestion

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of a folder or a file."""
EXAMPLES = f"{PROGRAM} init recipe prints a recipe that works, init profile a profile"
MOST_BYTES = 16 << 20
MOST_NESTED = 50
MOST_VALUES = 1_000_000
"""The most values of a file. An alias counts each time it is used, because a few lines of aliases can expand to billions of
values. Every 64 characters of a text count as one more value."""

# If PyYAML was built with libyaml, that is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))


@dataclass(frozen=True)
class Page:
    """One file. ``lines`` has the line of each key by its place: ``training.steps``, ``sweep.points[2].engine``."""

    values: Any
    lines: Mapping[str, int]
    problems: tuple[Problem, ...]


def read_page(path: Path) -> Page:
    """Read the mapping in ``path``.

    Raises:
        InputError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    root = _compose(_read_text(path), str(path))
    if root is None:
        raise input_error(str(path), "the file is empty", EXAMPLES)
    if not isinstance(root, yaml.MappingNode):
        raise input_error(f"{path}:{_line(root.start_mark)}", "the file is not a mapping of fields to values", EXAMPLES)
    return _build_page(root, str(path))


def parse_value(text: str) -> Any:
    """Parse one value of the command line. Empty text stays empty text.

    Raises:
        InputError: it is not YAML.
    """
    root = _compose(text, "")
    if root is None:
        return ""
    page = _build_page(root, "")
    if page.problems:
        raise InputError(page.problems)
    return page.values


def dump(values: Mapping[str, Any]) -> str:
    """Return ``values`` as YAML in their order, with innermost lists and mappings on one line."""
    text: str = yaml.dump(
        values, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )
    return text


def find_yaml(name: str, folders: Sequence[Path]) -> Path | None:
    """Return NAME.yaml of the first of ``folders`` that has it."""
    if not NAME.fullmatch(name):
        return None
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def suggest_yaml(name: str, folders: Sequence[Path]) -> str:
    """Return a text with the folders, and the closest name or all names that :func:`find_yaml` finds there."""
    names = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    looked = " and ".join(dict.fromkeys(map(str, folders)))
    return f"looked in {looked}; {suggestion(name, names) or 'there is none'}"


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        message = error.strerror or "cannot be read"
        raise input_error(str(path), f"{message[0].lower()}{message[1:]}", _suggest_file(path, error)) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise input_error(f"{path}:{line}", f"not UTF-8 text ({error.reason})", "save the file as UTF-8") from None


def _suggest_file(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "check its permissions"
    return suggestion(path, map(str, path.glob("*.yaml"))) or f"name a YAML file; {EXAMPLES}"


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        depth = 0
        # Composing recurses, and libyaml does not limit the depth of its own stack.
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_NESTED:
                raise input_error(f"{file}:{_line(event.start_mark)}", f"nested deeper than {MOST_NESTED} levels")
        return yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        message = ", ".join(part for part in (error.context, error.problem) if part)
        # At the end of the file the mark is behind the last line.
        line = min(_line(error.problem_mark), len(text.splitlines()))
        raise input_error(f"{file}:{line}", f"not YAML: {message}", _suggest_syntax(text)) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise input_error(f"{file}:{line}", f"not YAML: {error.reason}", "remove the character") from None


def _suggest_syntax(text: str) -> str:
    tabs = [n for n, line in enumerate(text.splitlines(), 1) if "\t" in line[: len(line) - len(line.lstrip())]]
    if tabs:
        return f"line {tabs[0]} is indented with a tab: YAML wants spaces"
    return "look for an open bracket or quote, uneven indentation, or braces in a text without quotes, up to this line"


def _build_page(root: yaml.Node, file: str) -> Page:
    walk = _Walk(file)
    walk.visit(root, "")
    try:
        values = yaml.constructor.SafeConstructor().construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise input_error(f"{file}:{_line(error.problem_mark)}", f"not YAML: {error.problem}") from None
    except (ValueError, KeyError) as error:
        message = f"a value does not fit its tag, or a number has thousands of digits ({str(error).split(';')[0]})"
        raise input_error(file, message, "write a plain value") from None
    return Page(values, walk.lines, tuple(walk.problems))


def _line(mark: Any) -> int:
    """Return the line of one of PyYAML's marks, whose two classes share no base."""
    return int(mark.line) + 1 if mark else 1


class _Walk:
    """Visits every node once: records lines, removes flawed entries, and counts values with aliases expanded."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._file = file
        self._sizes: dict[int, int] = {}

    def visit(self, node: yaml.Node, place: str) -> int:
        """Return the number of values in ``node``. An alias may have visited it before."""
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        # The node's size is unknown until it is complete. An alias to it that occurs before then lies inside the node.
        self._sizes[id(node)] = MOST_VALUES + 1
        self._check_tag(node, place)
        size = 1 + len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 1
        for inner, line, child in self._children(node, place):
            self.lines[inner] = line
            size += self.visit(child, inner)
        if size > MOST_VALUES:
            message = f"aliases contain themselves, or stand for more than {MOST_VALUES:,} values"
            raise input_error(f"{self._file}:{_line(node.start_mark)}", message, "write the values out")
        self._sizes[id(node)] = size
        return size

    def _children(self, node: yaml.Node, place: str) -> list[tuple[str, int, yaml.Node]]:
        """Return place, line and node of each item or value in ``node``."""
        if isinstance(node, yaml.SequenceNode):
            return [(f"{place}[{i}]", _line(item.start_mark), item) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return []
        node.value = self._valid_pairs(node, place)
        return [(_join(place, key), _line(key.start_mark), value) for key, value in node.value]

    def _valid_pairs(self, node: yaml.MappingNode, place: str) -> list[tuple[yaml.Node, yaml.Node]]:
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = _line(key.start_mark)
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                text = (key.value or "null") if isinstance(key, yaml.ScalarNode) else "of a list or mapping"
                self._problem(line, place, f"the key {text} is not text", "write it in quotes, or remove it")
            elif key.value in pairs:
                first = _line(pairs[key.value][0].start_mark)
                self._problem(line, _join(place, key), f"given twice (first in line {first})", "keep one of the two")
            else:
                pairs[key.value] = (key, value)
        return list(pairs.values())

    def _check_tag(self, node: yaml.Node, place: str) -> None:
        """Treat dates as text. Reject all tags except those of plain values."""
        if node.tag in _PLAIN:
            return
        if node.tag != _TAG + "timestamp":
            self._problem(_line(node.start_mark), place, f"the tag {node.tag} is not allowed", "write a plain value")
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq" if isinstance(node, yaml.SequenceNode) else "str"
        node.tag = _TAG + kind

    def _problem(self, line: int, place: str, message: str, fix: str) -> None:
        where = f"{self._file}:{line}"
        self.problems.append(Problem(f"{where}: {place}" if place else where, message, fix))


def _join(place: str, key: yaml.Node) -> str:
    return f"{place}.{key.value}" if place else str(key.value)
