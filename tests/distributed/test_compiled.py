"""Compiled passes between processes: results of eager mode, and refusals that all ranks hear."""

from __future__ import annotations

from pathlib import Path

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "compiled.py"


def test_two_processes_with_compiled_passes_give_what_eager_mode_gives():
    job = forked(JOB, 2)
    assert job.reports == {0: [], 1: []}, job.output
