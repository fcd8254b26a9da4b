"""What tests of pages share."""

from __future__ import annotations

import pytest

from penstock.training.rehearsal import conductor


@pytest.fixture
def rehearsed_in_threads(monkeypatch):
    """What is rehearsed, also for a contest, has threads as ranks: processes that load the package
    for seconds are for unit/cli/test_rehearse.py, unit/rehearsal and unit/trial."""
    monkeypatch.setattr(conductor, "_in_processes", conductor._in_threads)
