"""Tests of verbs are about what is said. How it is wrapped is that of ``test_terminal``; all others
have a wide window."""

import pytest


@pytest.fixture(autouse=True)
def wide_window(monkeypatch):
    """So that no phrase that a test looks for is in two lines."""
    monkeypatch.setenv("COLUMNS", "240")
