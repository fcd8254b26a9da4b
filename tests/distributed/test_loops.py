"""Ordinary loops between processes: every rank has its loader, and all come to the same end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "loops.py"


@pytest.mark.parametrize(
    "transport", ["shared-memory", pytest.param("process-group", marks=pytest.mark.soak)]
)
def test_loops_of_two_processes_are_those_of_one_device(transport):
    job = forked(JOB, 2, transport)
    assert job.reports == {0: [], 1: []}, job.output
