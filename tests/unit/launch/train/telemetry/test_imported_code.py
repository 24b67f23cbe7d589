"""Test which imported modules have a digest of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from launch.train.telemetry.imported_code import ImportedCode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of PYTHONPATH. The modules in it are forgotten after the test."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "venv" / "site-packages")
    return tmp_path


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def test_a_module_of_the_users_own_has_a_digest_once(folder: Path) -> None:
    write(folder / "own_package" / "layers.py", "WIDTH = 8\n")
    write(folder / "venv" / "site-packages" / "installed_module.py", "")
    write(folder / "generated.py", "")
    code = ImportedCode()
    code.digest_new()
    for name in ("own_package.layers", "installed_module", "colorsys"):
        importlib.import_module(name)
    generated = importlib.import_module("generated")
    del sys.modules["generated"]
    sys.modules["installed_module.generated"] = generated
    found = code.digest_new()
    assert [*found] == ["own_package.layers"]
    assert code.digest_new() == {}


def test_the_digests_are_those_of_path_and_content(folder: Path) -> None:
    found = []
    for source in ("WIDTH = 8\n", "WIDTH = 9\n"):
        write(folder / "own_module.py", source)
        sys.modules.pop("own_module", None)
        code = ImportedCode()
        code.digest_new()
        importlib.import_module("own_module")
        found.append(code.digest_new()["own_module"])
    assert found[0].path == found[1].path and found[0].content != found[1].content
    assert str(folder) not in found[0].path


def test_this_programs_own_modules_and_installed_ones_have_none() -> None:
    assert not {"launch.train.telemetry.imported_code", "json", "torch"} & {*ImportedCode().digest_new()}
