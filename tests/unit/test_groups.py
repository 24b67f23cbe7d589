"""Tests of one module run in one process of pytest-xdist (tests/conftest.py)."""

from __future__ import annotations

import pytest


def test_pytest_xdist_reads_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """It writes a test's group behind its name. Modules whose tests are scattered import and compile several times."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_groups") == grouped
