"""docs/architecture.md names every module of the three packages, and no other."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("orchestrator", "analysis", "launch")


def documented_modules() -> set[str]:
    """Return the paths of the tree in docs/architecture.md, whose lines are indented by two spaces per folder."""
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree")[2].partition("```\n")[2]
    modules, folders = set[str](), list[str]()
    for line in tree.partition("```")[0].splitlines():
        name = line.partition("#")[0].rstrip()
        depth, name = (len(name) - len(name.lstrip())) // 2, name.strip()
        folders[depth:] = [name] if name.endswith("/") else []
        if name.endswith(".py"):
            modules.add("".join(folders) + name)
    return modules


def test_the_tree_names_every_module() -> None:
    found = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert documented_modules() == {str(path) for path in found if path.name != "__init__.py"}
