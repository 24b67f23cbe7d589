"""A YAML file as plain values, with the line of every key, so that messages can point at them.

PyYAML keeps the last of two equal keys without a word, and stops at the first flaw that it does see. Here the flaws of
a file are gathered: keys given twice, keys that are no text, tags. What cannot be parsed at all ends the reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import InputError, Problem, input_error, suggestion

EXAMPLES = "recipes/, recipes/models/ and clusters/ hold examples"
MOST_NESTED = 50
MOST_VALUES = 1_000_000
"""Aliases counted as often as they stand: a few lines of them can stand for billions of values."""

# libyaml is ten times as fast, where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))


@dataclass(frozen=True)
class Page:
    """One file. ``lines`` holds the line of each key by its place: ``training.steps``, ``sweep.points[2].engine``."""

    values: Mapping[str, Any]
    lines: Mapping[str, int]
    problems: tuple[Problem, ...]


def read_page(path: Path) -> Page:
    """The mapping in ``path``.

    Raises:
        InputError: the file cannot be read, is not YAML, or holds something else than a mapping.
    """
    root = _compose(_text(path), str(path))
    if root is None:
        raise input_error(str(path), "the file is empty", EXAMPLES)
    if not isinstance(root, yaml.MappingNode):
        raise input_error(
            f"{path}:{_line(root.start_mark)}",
            "the file holds no mapping of fields to values",
            EXAMPLES,
        )
    walk = _Walk(str(path))
    walk.visit(root, "")
    return Page(_construct(root, str(path)), walk.lines, tuple(walk.problems))


def parse_value(text: str) -> Any:
    """One value, as the command line gives it; nothing is the empty text.

    Raises:
        InputError: it is not YAML.
    """
    root = _compose(text, "")
    if root is None:
        return ""
    walk = _Walk("")
    walk.visit(root, "")
    if walk.problems:
        raise InputError(walk.problems)
    return _construct(root, "")


def dump(values: Mapping[str, Any]) -> str:
    """``values`` as YAML, in their order, innermost lists and mappings in a line."""
    text: str = yaml.dump(
        values, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )
    return text


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise input_error(str(path), "no such file", _beside(path)) from None
    except IsADirectoryError:
        raise input_error(str(path), "a folder, not a file", _beside(path / "any")) from None
    except OSError as error:
        raise input_error(str(path), f"cannot be read ({error.strerror})", "see its permissions") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise input_error(f"{path}:{line}", f"not UTF-8 text ({error.reason})", "save the file as UTF-8") from None


def _beside(path: Path) -> str:
    names = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    return suggestion(str(path), names)


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):  # composing recurses, and libyaml's own stack has no guard
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_NESTED:
                raise input_error(f"{file}:{_line(event.start_mark)}", f"nested deeper than {MOST_NESTED} levels")
        return yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise input_error(f"{file}:{_line(error.problem_mark)}", f"not YAML: {said}", _hint(text)) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise input_error(f"{file}:{line}", f"not YAML: {error.reason}", "take the character out") from None


def _hint(text: str) -> str:
    tabs = [n for n, line in enumerate(text.splitlines(), 1) if "\t" in line[: len(line) - len(line.lstrip())]]
    if tabs:
        return f"line {tabs[0]} is indented with a tab: YAML wants spaces"
    return "look for an open bracket or quote, or for uneven indentation, up to this line"


def _construct(root: yaml.Node, file: str) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise input_error(f"{file}:{_line(error.problem_mark)}", f"not YAML: {error.problem}") from None
    except (ValueError, KeyError) as error:
        message = f"a tag that its value does not fit, or a number of thousands of digits ({str(error).split(';')[0]})"
        raise input_error(file, message, "write a plain value") from None


def _line(mark: Any) -> int:
    """The line of one of PyYAML's marks, whose two classes share no base."""
    return int(mark.line) + 1 if mark else 1


class _Walk:
    """Visits every node once: notes lines, takes out what is flawed, and counts what aliases stand for."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._file = file
        self._sizes: dict[int, int] = {}

    def visit(self, node: yaml.Node, place: str) -> int:
        """The number of values in ``node``, which an alias may have visited before."""
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        self._sizes[id(node)] = MOST_VALUES + 1  # for the time being: whoever meets it again is inside it
        self._retag(node, place)
        size = 1
        if isinstance(node, yaml.MappingNode):
            node.value = self._sound_pairs(node, place)
            size += sum(self.visit(value, _inside(place, key)) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[f"{place}[{index}]"] = _line(item.start_mark)
                size += self.visit(item, f"{place}[{index}]")
        if size > MOST_VALUES:
            raise input_error(
                f"{self._file}:{_line(node.start_mark)}",
                f"aliases that stand for themselves or for more than {MOST_VALUES:,} values",
                "write the values out",
            )
        self._sizes[id(node)] = size
        return size

    def _sound_pairs(self, node: yaml.MappingNode, place: str) -> list[tuple[yaml.Node, yaml.Node]]:
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = _line(key.start_mark)
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self._problem(
                    line, place, f"the key {shown or 'null'} is not text", "write it in quotes, or take it out"
                )
            elif key.value in pairs:
                first = _line(pairs[key.value][0].start_mark)
                self._problem(
                    line, _inside(place, key), f"given twice (line {first} has it too)", "keep one of the two"
                )
            else:
                pairs[key.value] = (key, value)
                self.lines[_inside(place, key)] = line
        return list(pairs.values())

    def _retag(self, node: yaml.Node, place: str) -> None:
        """Dates are text here, and tags beyond plain values are refused."""
        if node.tag in _PLAIN:
            return
        if node.tag != _TAG + "timestamp":
            self._problem(_line(node.start_mark), place, f"the tag {node.tag} is not taken", "write a plain value")
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq" if isinstance(node, yaml.SequenceNode) else "str"
        node.tag = _TAG + kind

    def _problem(self, line: int, place: str, message: str, remedy: str) -> None:
        where = f"{self._file}:{line}"
        self.problems.append(Problem(f"{where}: {place}" if place else where, message, remedy))


def _inside(place: str, key: yaml.Node) -> str:
    return f"{place}.{key.value}" if place else str(key.value)
