"""Test that the tests of a module run in one process of pytest-xdist (tests/conftest.py)."""

from __future__ import annotations

import pytest


def test_pytest_xdist_reads_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """pytest-xdist appends a test's group to its name. If the tests of a module are scattered, each process imports and
    compiles again."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_groups") == grouped
