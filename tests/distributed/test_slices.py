"""A job of two processes that works slice by slice."""

from __future__ import annotations

from pathlib import Path

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "slices.py"


def test_processes_train_slice_by_slice_as_one_device_does():
    done = forked(JOB, 2)
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}
